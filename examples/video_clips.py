"""Train on short clips of videos: a longer stretch is read and decoded at once, and gives several of them.

Two videos show a handwritten digit that moves to the right, or to the left; the network is to tell which from four
frames. `hr.video` reads stretches of 24 frames where they lie; `.flat_map()` makes clips of each, in worker processes,
so that no frame is decoded twice. It needs PyAV (`pip install headrace[pyav]`), which also writes the videos here.

    python examples/video_clips.py
"""

import argparse
import tempfile
from pathlib import Path

import av
import numpy as np
import torch
from torch import nn

import digits
import headrace as hr

MOVES = {"left": -1, "right": 1}
SIDE, FRAMES, CLIP = 32, 24, 4


def write_videos(folder, stretches):
    """A video for each way to move, of so many stretches, each of another scan."""
    scans, _ = digits.read_scans()
    for number, (name, way) in enumerate(MOVES.items()):
        with av.open(str(folder / f"{name}.mp4"), "w") as file:
            video = file.add_stream("libx264", rate=24, options={"g": str(FRAMES)})  # each begins with a key frame
            video.width = video.height = SIDE
            video.pix_fmt = "yuv420p"
            for stretch in range(stretches):
                shown = np.zeros((SIDE, SIDE), np.uint8)
                shown[8:24, 8:24] = np.kron(scans[2 * stretch + number], np.ones((2, 2), np.uint8))
                for frame in range(FRAMES):
                    moved = np.roll(shown, way * frame, axis=1)
                    file.mux(video.encode(av.VideoFrame.from_ndarray(np.stack([moved] * 3, 2), format="rgb24")))
            file.mux(video.encode(None))


def clips_of(stretch):
    """Clips one behind the other: (their frames [CLIP, SIDE, SIDE] float32 from 0 to 1, which way they move)."""
    frames = stretch["frames"][:, 0].astype(np.float32) / 255
    label = list(MOVES).index(Path(stretch["__key__"].rpartition("/")[0]).stem)
    return [(frames[begin : begin + CLIP], label) for begin in range(0, FRAMES, CLIP)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 stretches of each video in place of 60")
    stretches = 10 if parser.parse_args().quick else 60
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # or a bucket
        write_videos(folder, stretches)
        places = [str(folder / f"{name}.mp4") for name in MOVES]
        clips = hr.video(places, hr.Clips(frames=FRAMES), decoder="pyav").shuffle().flat_map(clips_of)
        net = nn.Sequential(
            nn.Conv2d(CLIP, 16, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16 * 7 * 7, len(MOVES))
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        with hr.DataLoader(clips, batch_size=16, num_workers=1) as loader:
            for _ in range(6):
                right = seen = 0
                for frames, labels in loader:
                    guess = net(frames)
                    loss = nn.functional.cross_entropy(guess, labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    right += (guess.argmax(1) == labels).sum().item()
                    seen += len(labels)
            print(f"the last epoch: {seen} clips of {len(MOVES) * stretches} stretches, {right / seen:.0%} told right")


if __name__ == "__main__":
    main()
