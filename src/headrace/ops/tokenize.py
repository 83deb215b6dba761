"""`.tokenize()`: texts to tokens, with the tokenizers of several libraries."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace._util.check import array_of
from headrace._util.functions import is_async
from headrace.ops.operator import EachSample, field_of, with_field
from headrace.workers.tasks import Step


def tokenize(tokenizer: object, field: str | int, into: str, dtype: str) -> EachSample:
    check.one_of(".tokenize(): dtype", dtype, ("int64", "int32", "uint16"))
    return EachSample(Step(f"tokenize({field!r})", "map", Tokenize(ids_by(tokenizer), field, into, dtype)))


class Tokenize:
    """Replaces the text in `field` by its tokens in the field `into`."""

    def __init__(self, ids: Callable[[str], Any], field: str | int, into: str, dtype: str) -> None:
        self._ids, self._field, self._into, self._dtype = ids, field, into, np.dtype(dtype)

    def __call__(self, sample: Any) -> object:
        text = field_of(sample, self._field)
        try:
            tokens = self._array(self._ids(text if isinstance(text, str) else str(text, "utf-8")))
        except TypeError as error:
            error.add_note(f"tokenize: the field {self._field!r} is a {type(text).__name__}")
            raise
        return with_field(sample, self._field, tokens, self._into)

    def _array(self, given: Any) -> NDArray[Any]:
        ids = given["input_ids"] if hasattr(given, "keys") else getattr(given, "ids", given)
        tokens = array_of(ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise TypeError(
                f"tokenize: the tokenizer gave a {type(given).__name__} for a text; a list or an array of its tokens' "
                "numbers is needed"
            )
        bounds = np.iinfo(self._dtype)
        for token in (tokens.min(), tokens.max()) if tokens.size else ():
            if not bounds.min <= token <= bounds.max:
                raise ValueError(f"tokenize: a token has the number {token}, which {self._dtype} cannot hold")
        return tokens.astype(self._dtype, copy=False)


class _Encoded:
    """Token ids by `tokenizers`' `encode_batch_fast`: a fifth cheaper, as it omits offsets."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> Any:
        (encoded,) = self._tokenizer.encode_batch_fast([text])
        return encoded

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # in a worker: other workers use the other cores


def ids_by(tokenizer: Any) -> Callable[[str], Any]:
    """Return a function from text to token ids."""
    if hasattr(tokenizer, "encode_to_numpy"):  # tiktoken refuses special tokens by default
        return functools.partial(tokenizer.encode_to_numpy, disallowed_special=())
    if hasattr(tokenizer, "encode_batch_fast"):
        return _Encoded(tokenizer)
    gives: Any = tokenizer if callable(tokenizer) else getattr(tokenizer, "encode", None)
    if not callable(gives) or is_async(gives):
        raise check.invalid(".tokenize(): tokenizer", tokenizer, "a tokenizer, or a plain function of a text")
    ids: Callable[[str], Any] = gives
    return ids
