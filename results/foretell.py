"""Does worth foretell? Each correction's worth at the start against what the recorded runs with it reached.

    python results/foretell.py          # measure what is missing, then write results/foretell.md and foretell.png

Every row of Table 1, Tables 6 to 10, the low-bit and the Praxis study whose sampler is another model, has other bits
or samples otherwise. Rows with one sampler are weighed together, on its responses, with worth.py: a record each in
results/worth.
"""

import json
import subprocess
import sys

import lowbit
import praxis
import qarl
import sweep
import table1
import table6_10

import worth

FOLDER = sweep.RESULTS / "worth"
# flags that say how rollouts are made; what is left of a row, without TRAINING, is its objective
SAMPLER = ("actor", "rollout_quant", "temperature", "top_p", "top_k", "keep_sampling_mask")
TRAINING = ("distill_lambda", "distill_kl_target", "lr", "model", "rollout_batch")


def rows() -> dict[tuple[str, str], tuple[str, dict]]:
    """(study, label) -> (configuration, flags), of the rows whose sampler is not the policy."""
    found = {}
    for name, config, given in (
        ("table1", sweep.STUDY, table1.ROWS),
        ("table6_10", sweep.STUDY, table6_10.ROWS),
        ("lowbit", qarl.CONFIG, lowbit.ROWS | qarl.ROWS),
        ("praxis", praxis.CONFIG, praxis.ROWS),
    ):
        for label, flags in given.items():
            if can_be_weighed(label, flags, config):
                found[name, label] = (config, flags)
    return found


def can_be_weighed(label: str, flags: dict, config: str) -> bool:
    """Not where the policy samples for itself, samples are stale, the learner rounds, or another K is recorded."""
    alone = flags.get("actor") == "none" or (config == qarl.CONFIG and "rollout_quant" not in flags)
    other = "rollout_batch" in flags or "learner_quant" in flags or "distill_kl_target" in flags
    return not (alone or other or label.startswith(("K = 10", "K = 40")))


def sampler_of(flags: dict) -> dict:
    return {key: flags[key] for key in SAMPLER if key in flags}


def row_of(flags: dict) -> str:
    """A row as worth.py takes it: tis is_cap=3."""
    more = [f"{key}={value}" for key, value in flags.items() if key not in (*SAMPLER, *TRAINING, "objective")]
    return " ".join([flags["objective"], *more])


def samplers() -> dict[str, tuple[str, dict, list[str]]]:
    """Name of a record -> (configuration, flags of the sampler, rows)."""
    found = {}
    for config, flags in rows().values():
        how = sampler_of(flags)
        name = sweep.slug(" ".join([config[8:-5], *map(str, how.values())]))
        found.setdefault(name, (config, how, []))[2].append(row_of(flags))
    everything = set(map(str.strip, worth.ROWS.split(";")))
    return {name: (config, how, sorted(everything | set(texts))) for name, (config, how, texts) in found.items()}


def measure(name: str, config: str, how: dict, texts: list[str]) -> None:
    """Weigh the rows of one sampler, if that is not recorded."""
    path = FOLDER / f"{name}.json"
    if path.is_file():
        return
    flags = [f"--{key}={value}" for key, value in how.items()]
    if config == praxis.CONFIG:  # a quarter of the responses in a batch, twice as long
        flags += ["--batches=48", "--reference=96", "--noise_batches=8"]
    argv = [sys.executable, "worth.py", f"--config={config}", *flags, f"--rows={'; '.join(texts)}", f"--json={path}"]
    done = subprocess.run(argv, cwd=sweep.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(argv[1:])} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def recorded(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def study(flags):
    for name, (config, how, texts) in samplers().items():
        if not flags.draw:
            measure(name, config, how, texts)


if __name__ == "__main__":
    sweep.main(study, __doc__)
