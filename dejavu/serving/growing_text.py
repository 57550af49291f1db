"""A request's text as its tokens come, up to its first stop string, of which not even the beginning is given out."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.models.tokenizer import IncrementalDecoder, TextCodec


class GrowingText:
    """One request's. Stop strings are looked for in the new text alone and what could begin one before it."""

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(codec)
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._text = ""
        self._num_given = 0
        self._stop_at: int | None = None
        self._starts: list[int] = []
        """Of the tokens, where there are stop strings."""

    @property
    def before_stop(self) -> str | None:
        """The whole text, once a stop string is in it; None until then."""
        return None if self._stop_at is None else self._text[: self._stop_at]

    @property
    def num_characters(self) -> int:
        """Of the text so far; a character that is incomplete does not count."""
        return len(self._text)

    @property
    def num_cut(self) -> int:
        """Tokens at the end of which nothing is before the stop string."""
        return 0 if self._stop_at is None else sum(start >= self._stop_at for start in self._starts)

    def push(self, token: int) -> bool:
        """The text has grown by the token. Returns whether a stop string is in it now."""
        if self._stops:
            self._starts.append(len(self._text))
        return self._grow(self._decoder.push(token))

    def finish(self) -> bool:
        """No token follows: what was held back of a character is text. Returns whether a stop string is in it now."""
        return self._grow(self._decoder.finish())

    def _grow(self, piece: str) -> bool:
        if piece and self._stop_at is None:
            first = max(len(self._text) - self._longest + 1, 0)
            self._text += piece
            found = [at for stop in self._stops if (at := self._text.find(stop, first)) >= 0]
            self._stop_at = min(found, default=None)
        return self._stop_at is not None

    def take(self) -> str:
        """What is certain and was not given out before."""
        end = len(self._text) - self._num_doubtful() if self._stop_at is None else self._stop_at
        given = self._text[self._num_given : end]
        self._num_given = max(end, self._num_given)
        return given

    def rest_of(self, final: str) -> str:
        """What is to be given out yet, so that all of it is ``final``."""
        given = self._text[: self._num_given]
        return final[len(given) :] if final.startswith(given) else self.take()

    def _num_doubtful(self) -> int:
        """Characters at the end with which a stop string may begin."""
        for count in range(min(self._longest - 1, len(self._text)), 0, -1):
            end = self._text[-count:]
            if any(stop.startswith(end) for stop in self._stops):
                return count
        return 0
