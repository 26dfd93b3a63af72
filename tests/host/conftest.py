"""Programs to examine, started in the same way as in the recorder's tests."""

from tests.recorder.conftest import program as program
