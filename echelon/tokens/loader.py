"""Load batches from a mixture of token shards, with prefetching and an exact, resumable position.

[Note: the position in the data] Samples are numbered across all ranks. A step takes the next
`batch` samples, and each rank reads its slice of these samples. The weights determine the source of
each sample, and (seed, source, epoch, number) determines the sample within that source. The
position therefore consists of the number of samples taken from each source, and the mixture's
credits (see `mixture.py`). The position is the same on all ranks and does not depend on the number
of ranks. Prefetched batches that the caller has not received are not counted.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from echelon import recorder
from echelon.tokens.mixture import Drawn, Mixture, Source
from echelon.tokens.packing import Packs
from echelon.tokens.permutation import permute
from echelon.tokens.windows import Windows

if TYPE_CHECKING:
    from typing_extensions import Self

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This rank's slice of one step's samples: B samples of T tokens each.

    Attributes:
        tokens: the input of the model: int64 [B, T].
        targets: the token that follows each input token: int64 [B, T]. With `mask_documents` or
            `pack_documents`, the target is -100 if the next token belongs to another document. In
            padding, the target is also -100.
        documents: the number of each token's document, counted from 0 within its row: int64 [B, T].
            Tokens can attend to each other only if these numbers are equal.
        sources: the index of the source from which each row was drawn: int64 [B].
        first_sample: the index of the first row's sample, counted across all ranks and steps.

    Example:
        >>> batch = next(iter(loader))
        >>> batch.tokens.shape, batch.targets.dtype
        ((4, 16), dtype('int64'))
        >>> bool((batch.tokens[:, 1:] == batch.targets[:, :-1]).all())
        True
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64]
    sources: NDArray[np.int64]
    first_sample: int

    @property
    def positions(self) -> NDArray[np.int64]:
        """Each token's offset from its document's first token in the row: int64 [B, T]."""
        places = np.broadcast_to(np.arange(self.documents.shape[1]), self.documents.shape)
        starts = np.zeros_like(self.documents)
        begins = self.documents[:, 1:] != self.documents[:, :-1]
        starts[:, 1:] = np.where(begins, places[:, 1:], 0)
        first: NDArray[np.int64] = np.maximum.accumulate(starts, axis=1)
        return places - first


@dataclass(frozen=True)
class _Position:
    """A loader's position after a batch."""

    num_samples: int
    taken: tuple[int, ...]
    credits: tuple[int, ...]


@dataclass(frozen=True)
class _Pending:
    """A batch that is being read, and the loader's position after this batch."""

    batch: Future[Batch]
    after: _Position


class TokenLoader:
    """An endless iterator over batches that reshuffles each source in every epoch.

    Each source is split into windows of `context` tokens, or its documents are packed into samples
    of this size. Each sample is drawn once per epoch. Background threads prefetch batches. The time
    that the caller spends waiting for a batch is recorded as a `data_wait` span. A loader must be
    used by only one thread at a time.

    Args:
        sources: the sources from which samples are drawn; their names must differ.
        context: T, the number of tokens in a sample.
        batch: the number of samples per step, over all ranks.
        rank: the rank of this process in the world.
        world_size: the number of ranks across which each batch is split, as evenly as possible. If
            `batch` is less than `world_size`, some ranks receive empty batches.
        seed: the seed that determines the order of samples.
        mask_documents: whether to exclude the first token of each document from the targets.
        pack_documents: whether to fill samples with whole documents (`packing.py`) instead of
            splitting the tokens at fixed intervals. A document is split only if it is longer than a
            sample. The first token of a document is never a target. To pack the documents, every
            rank reads the end positions of all of them.
        num_workers: the number of reader threads.
        prefetch: the number of batches to read ahead.

    Raises:
        ValueError: an argument is out of range, two sources have the same name, no weight is above
            0, or a source is too small: it has fewer than `context` + 1 tokens or, with
            `pack_documents`, no document of at least two tokens.

    Example:
        >>> web = Source("web", TokenShards("web"), weight=0.8)
        >>> code = Source("code", TokenShards("code"), weight=0.2)
        >>> with TokenLoader([web, code], context=16, batch=4, rank=0, world_size=1) as loader:
        ...     for batch in itertools.islice(loader, 10):
        ...         recorder.step()
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        context: int,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        mask_documents: bool = False,
        pack_documents: bool = False,
        num_workers: int = 1,
        prefetch: int = 2,
    ) -> None:
        _require_at_least(1, context=context, batch=batch, world_size=world_size)
        _require_at_least(1, num_workers=num_workers, prefetch=prefetch)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}")
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"two sources have the same name: {', '.join(names)}")
        self.sources = tuple(sources)
        self.context = context
        self.seed = seed
        self._batch = batch
        self._mine = slice(batch * rank // world_size, batch * (rank + 1) // world_size)
        self._packs = pack_documents
        self._samples = [
            _samples_of(source, context, packs=pack_documents, masks=mask_documents)
            for source in sources
        ]
        self._prefetch = prefetch
        self._mixture = Mixture([source.weight for source in sources])
        self._position = self._planned = _Position(0, (0,) * len(names), (0,) * len(names))
        self._pending: deque[_Pending] = deque()
        self._readers = ThreadPoolExecutor(num_workers, thread_name_prefix="token-loader")
        self._is_closed = False

    @property
    def num_samples(self) -> int:
        """The number of samples received so far, across all ranks."""
        return self._position.num_samples

    @property
    def epochs(self) -> dict[str, float]:
        """The (fractional) number of passes over each source so far, keyed by source name."""
        return {
            source.name: taken / len(self._samples[i])
            for i, (source, taken) in enumerate(
                zip(self.sources, self._position.taken, strict=True)
            )
        }

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; block until it has been read.

        Raises:
            TokenShardsError: a file is damaged or was removed.
            ValueError: the loader is closed.
        """
        if self._is_closed:
            raise ValueError("the loader is closed")
        while len(self._pending) < self._prefetch:
            self._plan()
        first = self._pending[0]
        with recorder.span("data_wait"):
            batch = first.batch.result()
        self._pending.popleft()  # kept if reading failed or was interrupted: no sample is skipped
        self._position = first.after
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain values that are the same on all ranks."""
        saved = zip(self.sources, self._position.taken, self._position.credits, strict=True)
        return {
            "version": _VERSION,
            "num_samples": self.num_samples,
            "context": self.context,
            "seed": self.seed,
            "pack_documents": self._packs,
            "sources": {
                source.name: {
                    "taken": taken,
                    "credit": credit,
                    "fingerprint": source.shards.index.fingerprint,
                }
                for source, taken, credit in saved
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, on any number of ranks.

        The batch size and the weights can differ from the saved values, and the loader can have
        sources that the state does not contain. Every source in the state must be passed to the
        loader, if necessary with weight 0.

        Raises:
            ValueError: the state has a different version, was saved with a different context, seed,
                `pack_documents` or tokens, or contains a source that this loader does not have. In
                these cases, the loader is left unchanged.
        """
        self._require_same(state)
        saved = state["sources"]
        rows = [saved.get(source.name, {"taken": 0, "credit": 0}) for source in self.sources]
        self._drop_pending()
        self._position = self._planned = _Position(
            int(state["num_samples"]),
            tuple(int(row["taken"]) for row in rows),
            tuple(int(row["credit"]) for row in rows),
        )

    def close(self) -> None:
        """Stop reading, and wait until reads in progress have ended. Can be called repeatedly."""
        self._is_closed = True
        self._drop_pending()
        self._readers.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        """Return the loader itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the loader."""
        self.close()

    def _plan(self) -> None:
        """Draw the samples of the next batch, and start reading this rank's slice of them."""
        before = self._planned
        self._mixture.taken, self._mixture.credits = list(before.taken), list(before.credits)
        drawn = self._mixture.draw(self._batch)
        self._planned = _Position(
            before.num_samples + self._batch,
            tuple(self._mixture.taken),
            tuple(self._mixture.credits),
        )
        mine = Drawn(drawn.source[self._mine], drawn.number[self._mine])
        first = before.num_samples + self._mine.start
        self._pending.append(_Pending(self._readers.submit(self._read, mine, first), self._planned))

    def _read(self, drawn: Drawn, first_sample: int) -> Batch:
        num = len(drawn.source)
        tokens, targets, documents = np.empty((3, num, self.context), np.int64)
        places = self._windows(drawn)
        for row, (source, place) in enumerate(zip(drawn.source, places, strict=True)):
            found = self._samples[source].read(int(place))
            tokens[row], targets[row], documents[row] = found.tokens, found.targets, found.documents
        return Batch(
            tokens=tokens,
            targets=targets,
            documents=documents,
            sources=drawn.source,
            first_sample=first_sample,
        )

    def _windows(self, drawn: Drawn) -> NDArray[np.int64]:
        """Return each sample's position within its source, after shuffling: int64 [num]."""
        windows = np.empty(len(drawn.source), np.int64)
        sizes = np.array([len(samples) for samples in self._samples], np.int64)
        epochs, places = np.divmod(drawn.number, sizes[drawn.source])
        for source, epoch in set(zip(drawn.source.tolist(), epochs.tolist(), strict=True)):
            rows = (drawn.source == source) & (epochs == epoch)
            name = zlib.crc32(self.sources[source].name.encode())
            windows[rows] = permute(places[rows], int(sizes[source]), (self.seed, name, epoch))
        return windows

    def _drop_pending(self) -> None:
        for pending in self._pending:
            pending.batch.cancel()
        self._pending.clear()

    def _require_same(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the saved position has version {state.get('version')}, but this "
                f"loader reads version {_VERSION}"
            )
        for name in ("context", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the position was saved with {name} {state[name]}, but this loader has "
                    f"{getattr(self, name)}: the samples would differ"
                )
        if state.get("pack_documents", False) != self._packs:
            raise ValueError(
                f"the position was saved with pack_documents={not self._packs}, but this "
                f"loader has pack_documents={self._packs}: the samples would differ"
            )
        here = {source.name: source.shards for source in self.sources}
        for name, row in state["sources"].items():
            if name not in here:
                raise ValueError(
                    f"the position contains source {name!r}: pass that source too, with weight "
                    "0 if it is unused"
                )
            if row["fingerprint"] != here[name].index.fingerprint:
                raise ValueError(
                    f"source {name!r} has changed since the position was saved: "
                    f"{here[name].folder} was prepared again"
                )


def _samples_of(source: Source, context: int, *, packs: bool, masks: bool) -> Windows | Packs:
    try:
        if packs:
            return Packs(source.shards, context)
        return Windows(source.shards, context, masks=masks)
    except ValueError as err:
        raise ValueError(f"source {source.name!r}: {err}") from None


def _require_at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")
