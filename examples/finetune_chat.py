"""Fine-tune on chats: the loss is of the answers alone, and batches have chats of about one length.

The chats are made of Python's language reference: somebody asks for a topic, and is answered with what it says. They
lie in a file of JSON lines, as such data do, and are read where they lie.

    python examples/finetune_chat.py
"""

import argparse
import json
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tokenizers
import torch
from torch import nn

import headrace as hr

VOCABULARY, LONGEST, IGNORED = 2048, 512, -100


def write_chats(path):
    """A line for each paragraph of the reference."""
    with path.open("w") as file:
        for name, text in topics.items():
            for paragraph in text.split("\n\n")[1:]:
                said = [
                    {"role": "user", "content": f"What does the reference say about {name}?"},
                    {"role": "assistant", "content": " ".join(paragraph.split())},
                ]
                file.write(json.dumps({"messages": said}) + "\n")


def learned_encoding():
    """A byte-pair encoding of the reference."""
    encoding = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoding.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<user>", "<assistant>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    encoding.train_from_iterator(list(topics.values())[:20], trainer)
    return encoding


class Chat:
    """Tokens of a chat, and its labels: what is not to be learned is ignored. It runs in worker processes."""

    def __init__(self, encoding):
        self.encoding = encoding

    def __call__(self, sample):
        ids, labels = [], []
        for message in sample["messages"]:
            mark = self.encoding.token_to_id(f"<{message['role']}>")
            said = [mark, *self.encoding.encode(message["content"]).ids]
            ids += said
            labels += said if message["role"] == "assistant" else [IGNORED] * len(said)
        return {"input_ids": np.array(ids[:LONGEST]), "labels": np.array(labels[:LONGEST])}


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.tokens, self.recurrent = nn.Embedding(VOCABULARY, width), nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids, labels):
        """The mean loss of the tokens that are learned."""
        hidden, _ = self.recurrent(self.tokens(ids))
        return nn.functional.cross_entropy(
            self.out(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 steps in place of an epoch")
    most = 12 if parser.parse_args().quick else None
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "chats.jsonl"  # or s3://bucket/chats-{000..099}.jsonl.zst
        write_chats(path)
        chats = (
            hr.stream(path, index="build")
            .shuffle()
            .map(Chat(learned_encoding()))
            .filter(lambda chat: (chat["labels"] != IGNORED).any())
            .bucket("input_ids", [32, 64, 128, 256], batch_tokens=2048, pad_value={"labels": IGNORED})
        )
        model, losses, tokens, padding = Model(), [], 0, 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with hr.DataLoader(chats, num_workers=1) as loader:
            for batch in loader:
                loss = model(batch["input_ids"], batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                tokens += batch["input_ids"].numel()
                padding += int((batch["input_ids"] == 0).sum()) - len(batch["input_ids"])  # each begins with a 0
                if len(losses) == most:
                    break
        print(f"{len(losses)} steps: loss {losses[0]:.2f} to {losses[-1]:.2f}; {padding / tokens:.0%} padding")


if __name__ == "__main__":
    main()
