"""The demo's model: a tiny Qwen3 with a tokenizer for its task, warmed up by supervised learning, offline."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deltasync.errors import ConfigError
from demo import task as counting
from demo.task import Task

WARMUP_STEPS = 120  # 0.21 nats per answer token; 200 steps give the same, 80 give 0.29
WARMUP_BATCH_SIZE = 32
WARMUP_LEARNING_RATE = 2e-3

_PAD, _TURN_START, _TURN_END, _UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
_WORDS = ["system", "user", "assistant", "count", "from", " ", "\n", *"0123456789"]
_IGNORE = -100  # label of a token without a loss, PyTorch's default


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return counting's tokenizer, with a token for each digit and word of the task; anything else becomes
    `<|unk|>`.

    Its chat template is one of TRL's, which TRL recognises by its text, and adds no system message.
    """
    vocabulary = [_PAD, _TURN_START, _TURN_END, _UNKNOWN, *_WORDS]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=_UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_TURN_END, pad_token=_PAD, unk_token=_UNKNOWN,
        additional_special_tokens=[_TURN_START],
    )  # fmt: skip
    template = resources.files("trl").joinpath("chat_templates", "qwen3_instruct_2507.jinja")
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a Qwen3 of about a million float32 parameters, drawn from torch's global generator."""
    config = Qwen3Config(
        vocab_size=64,  # more than the tokens in use: a multiple of 64, as vLLM pads it otherwise
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        # Large weights are coarse in bfloat16: fewer of them change per step, at the same learning rate.
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def demonstration_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels of counting, both (batch, length). Rows are equally long: numbers have two
    digits.
    """
    rows, labels = [], []
    for _ in range(WARMUP_BATCH_SIZE):
        start = rng.choice(counting.FIRST_STARTS)
        question = [{"role": "user", "content": counting.prompt_text(start)}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(counting.demonstration(start, rng) + _TURN_END)
        rows.append(prompt + answer)
        labels.append([_IGNORE] * len(prompt) + answer)
    return torch.tensor(rows), torch.tensor(labels)


COUNTING = Task(
    build_tokenizer,
    lambda tokenizer, rng, _: demonstration_batch(tokenizer, rng),
    WARMUP_STEPS,
    counting.training,
)


def load_task(name: str) -> Task:
    """Return the task of this name: `counting`, or that of an installed package; ConfigError if there is
    none.
    """
    if name == "counting":
        return COUNTING
    try:
        task: Task = importlib.import_module(f"{name}.task").TASK
    except ImportError as error:
        raise ConfigError(
            f"The task {name!r} is neither counting nor one of an installed package ({error}). "
            "Wordle comes with a checkout: pip install ./examples/wordle"
        ) from None
    return task


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    say: Callable[[str], None] | None = None,
    task: Task = COUNTING,
) -> float:
    """Train `model` in place on demonstrations of the task's teacher; return the last loss, in nats per
    answer token.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARMUP_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=WARMUP_LEARNING_RATE, total_steps=task.warmup_steps, pct_start=0.1
    )
    model.train()
    loss_nats = float("nan")
    for step in range(1, task.warmup_steps + 1):
        tokens, labels = task.batch(tokenizer, rng, step)
        logits = model(input_ids=tokens).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORE
        )
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss_nats = loss.item()
        if say is not None and step % 50 == 0:
            say(f"warm-up step {step} of {task.warmup_steps}, loss {loss_nats:.3f}")
    return loss_nats


def build_checkpoint(
    out: Path, seed: int, say: Callable[[str], None] | None = None, task: str = "counting"
) -> tuple[int, float]:
    """Write a warmed-up bfloat16 checkpoint with tokenizer, for transformers and for vLLM. Sets torch's
    global seed.

    Returns the number of parameters, and the loss at the end of the warm-up.
    """
    lesson, tokenizer, model = begin(seed, task)
    loss_nats = warm_up(model, tokenizer, seed, say, lesson)
    save_checkpoint(out, model, tokenizer)
    return model.num_parameters(), loss_nats


def begin(seed: int, task: str) -> tuple[Task, PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Return a task, its tokenizer and an untrained model. Sets torch's global seed."""
    torch.manual_seed(seed)
    lesson = load_task(task)
    tokenizer = lesson.build_tokenizer()
    return lesson, tokenizer, build_model(tokenizer)


def save_checkpoint(out: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a bfloat16 checkpoint with tokenizer, for transformers and for vLLM."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
