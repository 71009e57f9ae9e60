"""CI's guard against becoming slow: fedmix's local engine beside a plain PyTorch loop, in turns, in under a minute.

The ratio of the two hardly depends on the machine's mood, because both meet it. On two quiet cores it is about 1.5.
"""

import statistics
import sys
from pathlib import Path

import peers
import setting

LEAST = 1.05  # times as fast as the plain loop; leaves room for noise
TURNS = 5


def main() -> None:
    setting.write(peers.SETTING)
    python = Path(sys.executable)
    ours = peers.Contestant("fedmix local", python, "ours.py", "local", "fedavg")
    plain = peers.Contestant("plain PyTorch loop", python, "plain.py")
    try:
        for _ in range(1 + TURNS):
            ours.turn()
            plain.turn()
    finally:
        ours.close()
        plain.close()
    ratio = statistics.median(b / a for a, b in zip(ours.seconds(1), plain.seconds(1), strict=True))
    print(
        f"fedmix local: {statistics.median(ours.seconds(1)):.2f} s a round, {ratio:.2f} times as fast as a plain loop"
    )
    apart = abs(ours.answers[1]["loss"] - plain.answers[1]["loss"])
    if apart > 0.01 * plain.answers[1]["loss"]:
        sys.exit(f"the losses must agree within 1 %. They are {apart:.4f} apart.")
    if ratio < LEAST:
        sys.exit(f"it must be at least {LEAST} times as fast. Profile a round: python benchmarks/rounds.py cifar10")


if __name__ == "__main__":
    main()
