"""The work of AGCLR's tables: data, text, the training of every arm on every task, and its answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_model

from sidestream.evaluation.latent import generate_answers
from sidestream.experiments.provenance import record_call, write_whole
from sidestream.experiments.results import Outcome
from sidestream.experiments.run import Job, Measured, Work
from sidestream.experiments.settings import first_difference, to_json
from sidestream.lm.attach import attach
from sidestream.lm.decoding.layout import Layout
from sidestream.lm.decoding.passes import PassConfig
from sidestream.lm.models.backbones import Backbone, parameter_count
from sidestream.lm.texts.text import Vocabulary, WordVocabulary
from sidestream.papers.agclr.settings import ARMS, DERIVED, MEASURED, LatentSettings
from sidestream.tasks import gsm8k, hops, hotpotqa, prosqa, prosqa_generator
from sidestream.tasks.base import ReasoningExample, Split, data_hash, read_jsonl
from sidestream.training.curriculum import Call, Problem, prompt
from sidestream.training.latent import LatentLM, StepDecoder, pretrained, train_curriculum
from sidestream.training.loop import FINAL, WEIGHTS

SCORERS = {
    "hops": hops.score,
    "masked": hops.score,
    "prosqa": prosqa.score,
    "gsm8k": gsm8k.score,
    "hotpotqa": hotpotqa.score,
}
SHARED = "all_arms"
"""Folder of what arms share."""
MARKS = ("<start>", "<end>", "<latent>", "<stop>")
"""The special words of word-level vocabularies."""


@dataclass(frozen=True, kw_only=True)
class TextForm:
    """How problems of a task become tokens, and tokens text."""

    vocabulary: Vocabulary | WordVocabulary
    layout: Layout
    stop_id: int
    """Ends an answer."""
    size: int
    """Tokens in all."""
    lines: bool
    """CoCoNuT's text: question and steps end their lines, `### ` stands before the answer. Off: words alone."""

    @staticmethod
    def words(known: Iterable[str], *, markers: bool) -> TextForm:
        """One token a word."""
        words = (*known, *MARKS)
        vocabulary = WordVocabulary(words, size=len(words) + 1)
        start, end, latent, stop = (vocabulary.encode(mark)[0] for mark in MARKS)
        layout = Layout(start_id=start, end_id=end, latent_id=latent, markers=markers)
        return TextForm(vocabulary=vocabulary, layout=layout, stop_id=stop, size=vocabulary.size, lines=False)

    @staticmethod
    def bpe(*, markers: bool) -> TextForm:
        """GPT-2's BPE and three new tokens."""
        vocabulary = Vocabulary()
        first = vocabulary.size
        layout = Layout(start_id=first, end_id=first + 1, latent_id=first + 2, markers=markers)
        return TextForm(vocabulary=vocabulary, layout=layout, stop_id=vocabulary.pad_id, size=first + 3, lines=True)

    @property
    def pad_id(self) -> int:
        """Padding, masked out wherever it stands."""
        return self.vocabulary.pad_id

    def encode(self, example: ReasoningExample) -> Problem:
        """A problem as token ids."""
        end, mark = ("\n", "### ") if self.lines else ("", "")
        encode = self.vocabulary.encode
        return Problem(
            tuple(encode(example.question + end)),
            tuple(tuple(encode(step + end)) for step in example.steps),
            (*encode(mark + example.answer), self.stop_id),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Generated tokens as text, special ones left out."""
        marks = (self.layout.start_id, self.layout.end_id, self.layout.latent_id)
        return self.vocabulary.decode([token for token in ids if token not in marks])


class LatentWork(Work[LatentSettings]):
    """Data, models and trained arms of one run; a table's own class says what is measured (`measure`)."""

    def __init__(self, settings: LatentSettings, directory: Path, *, show: bool = True) -> None:
        super().__init__(settings, directory, show=show)
        self.trained = Path(settings.models) if settings.models else directory
        self.examples = cache(self._examples)
        self.form = cache(self._form)
        self.encoded = cache(self._encoded)

    def measure(self, task: str, arm: str, module: LatentLM) -> list[Outcome]:
        """What a table wants to know of a trained arm; `arm` may be one of `DERIVED`, whose switch is set."""
        raise NotImplementedError

    def jobs(self) -> list[Job]:
        """Stage 0, which arms share, and each arm on each task."""
        e, made = self.settings, []
        for task in e.tasks:
            shared = any(self.shared_calls(task, arm) for arm in e.arms if arm in ARMS)
            if shared:
                made.append(
                    Job(name=f"{task}/{SHARED}", work=lambda task=task: self._share_job(task), stages=self.stages(task))
                )
            for arm in e.arms:
                source = DERIVED[arm][0] if arm in DERIVED else None
                needs = (f"{task}/{source}",) if source else (f"{task}/{SHARED}",) if shared else ()
                made.append(
                    Job(
                        name=f"{task}/{arm}",
                        work=lambda task=task, arm=arm: self._arm(task, arm),
                        needs=needs,
                        stages={} if source else self.stages(task, arm),
                    )
                )
        return made

    def _share_job(self, task: str) -> None:
        self.share(task)
        self._copy_logs(self.stages(task))

    def _arm(self, task: str, arm: str) -> Measured:
        """Train one arm on one task, or take the one that it is derived from, and measure it."""
        source, until = DERIVED.get(arm, (arm, None))
        module = self.load(task, source)
        if until is not None:
            module.model.stream.config = replace(module.model.stream.config, write_until=until)
            return Measured(outcomes=self.measure(task, arm, module))
        self._copy_logs(self.stages(task, arm))
        # Counted first: what is measured may load weights of earlier stages.
        parameters = parameter_count(module.model)
        return Measured(outcomes=self.measure(task, arm, module), facts={"parameters": parameters})

    def _copy_logs(self, stages: Iterable[Path]) -> None:
        """From the folder of shared arms into the run's, where its report looks."""
        for folder in stages:
            if self.trained != self.directory and (folder / "metrics.jsonl").exists():
                here = self.directory / folder.relative_to(self.trained)
                here.mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / "metrics.jsonl", here)

    def answers(
        self, task: str, arm: str, module: LatentLM, *, stage: int | None = None, **changed: Any
    ) -> dict[str, list[float]]:
        """Metric -> one score a problem, of an arm's answers.

        Args:
            stage: on the prompts of another stage than the last.
            changed: other arguments of `generate_answers`, for what stands in the latents.
        """
        options = {"config": module.pass_config, "max_new_tokens": self.settings.new_tokens, **changed}
        said = generate_answers(
            module.model, self.prompts(task, arm, stage), stop_id=self.form(task).stop_id, **options
        )
        return self.scores(task, said)

    # ---------------------------------------------------------------- data

    def origin(self, command: str) -> dict[str, Any]:
        """This run's calls, and those that trained arms in a folder shared with others."""
        e, everything, shared = self.settings, [], []
        for task in e.tasks:
            folder = self.open_task(task)
            training = self.examples(task, "train")
            everything += [*training, *self.examples(task, e.split)]
            if e.models:
                shared.append(record_call(folder, command, data_hash(training)))
        origin = record_call(self.directory, command, data_hash(everything))
        return {**origin, "dirty": origin["dirty"] or any(call["dirty"] for call in shared)}

    def open_task(self, task: str) -> Path:
        """The folder of a task's trained arms, checked to be of these settings.

        Raises:
            ValueError: it holds arms of other settings.
        """
        e, folder = self.settings, self.trained / task
        data = f"{task}_data"
        record: dict[str, Any] = {"training": to_json(e.training(task)), "backbone": to_json(e.backbone)}
        record["data"] = to_json(getattr(e, data)) if hasattr(e, data) else None
        for name in ("seed", "files", "base", "positions", "markers", "step_layers", "step_weight", "gain_rate"):
            record[name] = getattr(e, name)
        path = folder / "training.json"
        if path.exists():
            difference = first_difference(record, json.loads(path.read_text(encoding="utf-8")))
            if difference:
                raise ValueError(f"{folder} holds arms trained otherwise: {difference}; choose another --models")
        else:
            write_whole(path, json.dumps(record, indent=1) + "\n")
        return folder

    def _examples(self, task: str, split: Split) -> list[ReasoningExample]:
        """Problems of a split, made or fetched once a run.

        Raises:
            ValueError: they cannot be had, or there are none.
        """
        e = self.settings
        folder, count = self.directory, e.test_problems
        if split == "train":
            folder, count = self.trained, e.training(task).problems
        path = folder / task / f"{split}.jsonl"
        if not path.exists():
            found = list(islice(self._source(task, split), count))
            if not found:
                raise ValueError(f"task {task!r} has no problems in its split {split}")
            write_whole(path, "".join(json.dumps(example.row()) + "\n" for example in found))
        return read_jsonl(path)

    def _source(self, task: str, split: Split) -> Iterator[ReasoningExample]:
        e = self.settings
        file = _file_of(e.files, task, split)
        if file is not None:
            if task == "prosqa":
                return (problem.example for problem in prosqa.read(file))
            return iter({"gsm8k": gsm8k.read, "hotpotqa": hotpotqa.read}.get(task, read_jsonl)(file))
        # Other training problems for each seed, the same test problems for all.
        later = e.seed if split == "train" else 0
        if task == "prosqa":
            made = prosqa_generator.problems(replace(e.prosqa_data, seed=e.prosqa_data.seed + later), split)
            return (problem.example for problem in made)
        if task in ("hops", "masked"):
            config = e.hops_data if task == "hops" else e.masked_data
            return (problem.example for problem in hops.problems(replace(config, seed=config.seed + later), split))
        return iter(gsm8k.load_hub(split) if task == "gsm8k" else hotpotqa.load_hub(split))

    def _form(self, task: str) -> TextForm:
        e = self.settings
        train = self.examples(task, "train")
        wordy = task in ("hops", "masked") or task == "prosqa" and prosqa.is_short(train[0].question)
        if not wordy or e.base is not None:
            return TextForm.bpe(markers=e.markers)
        if _file_of(e.files, task, "train") is not None:
            texts = (text for example in train for text in (example.question, *example.steps, example.answer))
            return TextForm.words(sorted({word for text in texts for word in text.split()}), markers=e.markers)
        if task == "prosqa":
            return TextForm.words(prosqa_generator.words(e.prosqa_data), markers=e.markers)
        return TextForm.words(hops.words(e.hops_data if task == "hops" else e.masked_data), markers=e.markers)

    def _encoded(self, task: str, split: Split) -> list[Problem]:
        form = self.form(task)
        return [form.encode(example) for example in self.examples(task, split)]

    # ---------------------------------------------------------------- models

    def fresh(self, task: str, arm: str) -> LatentLM:
        """An arm before training. The base model starts the same in every arm."""
        e, spec, form = self.settings, ARMS[arm], self.form(task)
        torch.manual_seed(e.seed)
        lm: Any = self._base(form)
        blocks = None
        if spec.step_decoder:
            width, heads = int(lm.config.hidden_size), int(lm.config.num_attention_heads)
            family: Literal["gpt2", "llama"] = "llama" if lm.config.model_type == "llama" else "gpt2"
            shape = Backbone(layers=e.step_layers, width=width, heads=heads, family=family)
            blocks = shape.build(vocabulary=1, window=e.positions, pad_id=0)
        training = e.training(task)
        config = PassConfig(
            latent_id=form.layout.latent_id,
            # One forward cannot hide text; pass by pass the numbers are the same.
            slots="pause_multi" if spec.slots == "pause" and training.sees != "all" else spec.slots,
            sees=training.sees,
            hides=training.hides,
        )
        if spec.stream is not None:
            init = spec.stream.init if spec.stream.init == "identity" else training.gates
            lm = attach(lm, stream=replace(spec.stream, init=init))
        decoder = None if blocks is None else StepDecoder(blocks, training.curriculum.latents_per_step)
        return LatentLM(lm, config, step_decoder=decoder, step_weight=e.step_weight).to(self.device)

    def _base(self, form: TextForm) -> Any:
        e = self.settings
        if e.base is None:
            return e.backbone.build(vocabulary=form.size, window=e.positions, pad_id=form.pad_id)
        layout = form.layout
        new = (layout.start_id, layout.end_id, layout.latent_id)
        # The published code lets its new tokens start as `<<`.
        return pretrained(e.base, size=form.size, new_ids=new, like=form.vocabulary.encode("<<")[0])

    def calls(self, task: str) -> list[Call]:
        """The calls of training that a task's arms consist of."""
        training = self.settings.training(task)
        epoch = len(self.examples(task, "train")) // training.loop.batch_size
        return training.curriculum.calls(training.loop.steps, epoch)

    def shared_calls(self, task: str, arm: str = "coconut") -> list[Call]:
        """The calls of stage 0, all steps and no latents, if the arm takes them from the folder that arms share.

        There all arms with the curriculum are one model, which is trained once. There are none where the optimiser
        outlives the stage.
        """
        # CHOICE(AGCLR, Training): without a pretrained model, arms without the curriculum (no-CoT, pause) start from
        # the same weights, or they would have to learn the look-up from answers alone, which GPT-2 has not to.
        mine = ARMS[arm].text == "latent" or self.settings.base is None
        return [call for call in self.calls(task) if call.stage == 0] if mine else []

    def stages(self, task: str, arm: str = SHARED) -> dict[Path, int]:
        """Folders of the calls that are an arm's own (or that arms share) and their steps."""
        calls = self.shared_calls(task)
        if arm != SHARED:
            calls = self.calls(task)[len(self.shared_calls(task, arm)) :]
        return {self.trained / task / arm / call.name: call.steps for call in calls}

    def share(self, task: str) -> LatentLM:
        """The model that arms start from: its calls are trained as far as the directory lacks them."""
        module = self.fresh(task, "coconut")
        self._train(task, "coconut", module, SHARED, self.shared_calls(task))
        return module

    def load(self, task: str, arm: str) -> LatentLM:
        """An arm, trained as far as the directory lacks it, in evaluation mode."""
        module, calls = self.fresh(task, arm), self.calls(task)
        shared = self.shared_calls(task, arm)
        if shared:
            module.lm.load_state_dict(self.share(task).lm.state_dict())
        self._train(task, arm, module, arm, calls[len(shared) :])
        return module

    def _train(self, task: str, arm: str, module: LatentLM, folder: str, calls: list[Call]) -> None:
        e, form, training = self.settings, self.form(task), self.settings.training(task)
        loop = training.loop
        if calls and calls[0].stage > 0:
            loop = replace(loop, learning_rate=loop.learning_rate * training.later_rate)
        train_curriculum(
            module,
            self.encoded(task, "train"),
            ARMS[arm].text,
            training.curriculum,
            form.layout,
            loop,
            self.trained / task / folder,
            seed=e.seed,
            pad_id=form.pad_id,
            stop_id=form.stop_id,
            label=self.label(f"{task} {folder}"),
            tags={"arm": folder, "stage": f"{task}, stage {{stage}}"},
            rates={"gain": e.gain_rate},
            calls=calls,
        )

    def at_stages(self, task: str, arm: str, module: LatentLM) -> Iterator[tuple[int, LatentLM]]:
        """The module with the weights it had after each stage whose weights were kept, the last one last."""
        shared = len(self.shared_calls(task, arm))
        for number, call in enumerate(self.calls(task)):
            if call.ends_stage:
                if number < shared:
                    module.lm.load_state_dict(self.share(task).lm.state_dict())
                else:
                    load_model(module, str(self.trained / task / arm / call.name / FINAL / WEIGHTS))
                yield call.stage, module

    def prompts(self, task: str, arm: str, stage: int | None = None) -> list[list[int]]:
        """What an arm's answers to the evaluated problems start from, in the last stage or in another."""
        curriculum = self.settings.training(task).curriculum
        at = curriculum.last_stage if stage is None else stage
        problems, layout = self.encoded(task, self.settings.split), self.form(task).layout
        text = ARMS[DERIVED.get(arm, (arm,))[0]].text
        return [prompt(problem, text, at, curriculum, layout) for problem in problems]

    def scores(self, task: str, answers: Sequence[Sequence[int]]) -> dict[str, list[float]]:
        """Metric -> one score a problem."""
        form = self.form(task)
        found = [
            SCORERS[task](example, form.decode(ids)).values
            for example, ids in zip(self.examples(task, self.settings.split), answers, strict=True)
        ]
        return {metric: [values[metric] for values in found] for metric in MEASURED.get(task, ("accuracy",))}


def common_notes(e: LatentSettings) -> list[str]:
    """How the numbers of every table of AGCLR were made."""
    notes = [
        f"One seed ({e.seed}). No split chose anything: the weights after the last step are evaluated, on the "
        f"{e.split} split, whose problems are the same for every arm and seed.",
        "Every arm of a task trains for the same number of steps, in the same order of problems.",
    ]
    if e.base is None and "prosqa" in e.tasks:
        notes.append(
            "The paper's values are GPT-2's on the full data sets; `prosqa` here has up to "
            f"{e.prosqa_data.nodes} nodes and a small model from scratch."
        )
    if "masked" in e.tasks:
        masked = e.training("masked")
        hidden = "the latest latent" if masked.sees == "last" else "the first latent"
        seen = "nothing" if masked.hides is None else f"the question without its last {masked.hides} words, the query"
        notes.append(
            f"`masked`: of what stands before {hidden}, later passes and the answer see {seen}; the answer needs "
            "f^k(x) and f(x)."
        )
    return notes


def _file_of(folder: str | None, task: str, split: str) -> Path | None:
    """The file of a split in a folder of data.

    Raises:
        ValueError: the folder has other splits of the task and not this one, or this one twice.
    """
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise ValueError(f"files {folder}: there is no such folder")
    there = [path for path in sorted(Path(folder).iterdir()) if path.name.startswith(f"{task}_")]
    mine = [path for path in there if path.name.split(".")[0] == f"{task}_{split}"]
    if len(mine) > 1 or there and not mine:
        raise ValueError(f"{folder} must hold one file {task}_{split}.*; it holds {', '.join(p.name for p in there)}")
    return mine[0] if mine else None
