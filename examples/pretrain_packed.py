"""Pre-train a small language model on sequences of packed documents, mixed of prose and code.

The text is what Python brings along: its language reference, and the source of its library. A byte-pair encoding is
learned of both, and the documents are written once as files of tokens, as for any pre-training. From there on:

* documents are packed into sequences of one length, best fit: whole where they can be, and nearly nothing is padding;
* the two are mixed by weight. Sequences have as many tokens each, so that shares of sequences are shares of tokens;
* attention stays within documents, by `document_ids`, and positions begin anew with each;
* training stops in the middle, and goes on from the state with the very next sequence.

    python examples/pretrain_packed.py
"""

import argparse
import inspect
import json
import pkgutil
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tokenizers
import torch
from torch import nn

import headrace as hr

LENGTH, VOCABULARY, END = 256, 2048, 0


def documents():
    """{"prose": texts, "code": texts}."""
    names = sorted(module.name for module in pkgutil.iter_modules(json.__path__, "json."))
    modules = [*names, "argparse", "ast", "csv", "heapq", "inspect", "pathlib", "statistics", "tempfile", "textwrap"]
    functions = []
    for name in modules:
        module = __import__(name, fromlist=["_"])
        functions += [
            inspect.getsource(value)
            for _, value in sorted(vars(module).items())
            if inspect.isfunction(value) and value.__module__ == name
        ]
    return {"prose": list(topics.values()), "code": functions}


def write_tokens(folder, corpora):
    """A file of tokens for each corpus, each document ended by one token; the shares that they have of all tokens."""
    encoding = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoding.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    encoding.train_from_iterator([text for texts in corpora.values() for text in texts], trainer)
    for name, texts in corpora.items():
        ids = [[*found.ids, END] for found in encoding.encode_batch(texts)]
        np.concatenate(ids).astype(np.uint16).tofile(folder / f"{name}.bin")


def sequences(folder, name):
    """Packed sequences of a corpus: of each file just what a sequence needs is read."""
    data = hr.tokens(folder / f"{name}.bin", "uint16", LENGTH, eos=END, documents="separate", tail="short")
    return data.pack(LENGTH, tokens="tokens", method="best_fit").shuffle()


class Model(nn.Module):
    """One block of attention."""

    def __init__(self, width=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, batch):
        """The mean loss of the tokens that follow one of their own document."""
        ids, of, at = batch["tokens"].long(), batch["document_ids"], batch["position_ids"]
        is_masked = (of[:, :, None] != of[:, None, :]) | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = self.block(self.tokens(ids) + self.places(at), src_mask=is_masked.repeat_interleave(4, 0))
        follows = (of[:, 1:] == of[:, :-1]) & (of[:, 1:] >= 0)
        return nn.functional.cross_entropy(self.out(hidden[:, :-1])[follows], ids[:, 1:][follows])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 steps in place of 200")
    steps = 12 if parser.parse_args().quick else 200
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # or "s3://bucket/tokens"
        write_tokens(folder, documents())
        mixed = hr.mix(
            {"prose": sequences(folder, "prose"), "code": sequences(folder, "code")},
            weights={"prose": 0.7, "code": 0.3},
            until="forever",
        )
        model, seen, padding, losses = Model(), {"prose": 0, "code": 0}, [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        state = {}
        for until in (steps // 2, steps):  # as if the run had been killed between
            with hr.DataLoader(mixed, batch_size=8, num_workers=1) as loader:
                loader.load_state_dict(state)
                for batch in loader:
                    loss = model(batch)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                    padding.append((batch["document_ids"] < 0).float().mean().item())
                    for source in batch["__source__"]:
                        seen[source] += LENGTH
                    if len(losses) == until:
                        break
                state = json.loads(json.dumps(loader.state_dict()))
        shares = ", ".join(f"{name} {count / sum(seen.values()):.2f}" for name, count in seen.items())
        print(f"{steps} steps: loss {losses[0]:.2f} to {losses[-1]:.2f}; {np.mean(padding):.1%} padding; {shares}")


if __name__ == "__main__":
    main()
