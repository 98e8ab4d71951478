"""From a document to token ids, its special tokens said explicitly."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

# Cutting a text changes the tokens next to the cut, so a prefix must give this many more than are used.
MARGIN = 256


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and what it puts around a document.

    Attributes:
        tokenizer: A transformers tokenizer.
        before: Token ids before each document (BOS, by the rule in force).
        after: Token ids after each document (none for most models, EOS for some).
    """

    tokenizer: Any
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, bos: bool | None) -> Encoder:
        """Returns the encoder of a BOS rule: None = the tokenizer's own, True = one, False = none."""
        probe = tokenizer.encode("a", add_special_tokens=False)
        whole = list(tokenizer.encode("a"))
        if probe:
            at = next(i for i in range(len(whole)) if whole[i : i + len(probe)] == probe)
            before, after = whole[:at], whole[at + len(probe) :]
        else:  # a vocabulary without this letter
            before, after = whole, []
        token = tokenizer.bos_token_id
        if bos and token is None:
            raise ValueError("this tokenizer has no BOS token: leave bos=None, or set tokenizer.bos_token")
        if bos and before[:1] != [token]:
            before = [token, *before]
        elif bos is False and token is not None:
            before = [i for i in before if i != token]
        return cls(tokenizer, tuple(before), tuple(after))

    def body(self, text: str) -> list[int]:
        """All token ids of a text, without `before` and `after`."""
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def start(self, text: str, n: int) -> list[int]:
        """The first `n` token ids of a text, or all if there are fewer; reads no more than it must.

        What follows in a text changes tokens near a cut only, so a prefix is tokenised that gives
        `MARGIN` tokens more than are used.
        """
        end = 6 * (n + MARGIN)  # an English token has about 4.5 characters
        while end < len(text):
            ids = self.body(text[:end])
            if len(ids) >= n + MARGIN:
                return ids[:n]
            end *= 2
        return self.body(text)[:n]

    def identity(self) -> dict[str, Any]:
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is None:
            content = {"class": type(self.tokenizer).__name__, "vocabulary": self.tokenizer.get_vocab()}
        else:
            content = json.loads(fast.to_str())
            content.pop("truncation", None)  # both follow the last call
            content.pop("padding", None)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
        return {"sha256": digest, "before": list(self.before), "after": list(self.after)}
