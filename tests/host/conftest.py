"""Programs to look at, as the recorder's tests start them."""

from tests.recorder.conftest import program as program
