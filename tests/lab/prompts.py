"""What SGLang's benchmark needs beside itself: a tokenizer without training, and prompts."""

import json
from pathlib import Path

from lab.guest.sglang_text import WORDS

UNKNOWN = "<unk>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)
MOE_MODEL = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "torch_dtype": "bfloat16",
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "hidden_size": 3072,
        "num_hidden_layers": 48,
    },
}
"""Its config: on 4 GPUs its kernels are looked up for E=256, N=256."""
_TOPICS = (
    "the tides", "a bicycle's gears", "the printing press", "sourdough bread", "honey bees",
    "a lighthouse", "the water cycle", "a sailing boat", "paper money", "volcanoes",
    "a pocket watch", "the common cold", "railway signals", "coral reefs", "a suspension bridge",
    "the northern lights",
)  # fmt: skip
_QUESTIONS = (
    ("Explain in plain words how {topic} came about, and give one example.", 40),
    ("What does a beginner most often get wrong about {topic}, and why?", 48),
    ("Write a short letter to a friend who has never heard of {topic}.", 64),
    ("List three questions that a child might ask about {topic}, with answers.", 56),
    ("Compare {topic} today with a hundred years ago. Which changes mattered?", 72),
    ("I have ten minutes to learn about {topic}. What should I read first?", 32),
    ("Tell a story of about a page in which {topic} saves the day.", 96),
    ("Give arguments for and against spending public money on {topic}.", 80),
    ("How would you measure whether somebody understands {topic}?", 48),
    ("Summarise what is not yet known about {topic}, for a newspaper.", 64),
)
_WISHES = (
    "Keep it simple.",
    "Use no technical words.",
    "Write for an expert.",
    "Begin with the conclusion.",
)
_ANSWER = (
    "A good way to begin is to look at the whole thing from some distance and only then at its "
    "parts, because most of what goes wrong does so where two parts meet. "
)


def conversations() -> list[dict[str, object]]:
    """640 short ones in ShareGPT's form: a question about a topic and an answer of some words."""
    return [
        {
            "id": f"{number}-{place}-{style}",
            "conversations": [
                {"from": "human", "value": f"{question.format(topic=topic)} {wish}"},
                {"from": "gpt", "value": " ".join((_ANSWER * 4).split()[:words])},
            ],
        }
        for number, (question, words) in enumerate(_QUESTIONS)
        for place, topic in enumerate(_TOPICS)
        for style, wish in enumerate(_WISHES)
    ]


def write_prompts(folder: Path) -> None:
    """Writes prompts.json (for --dataset-name sharegpt) and prompts.jsonl (for custom)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.json").write_text(json.dumps(conversations()))
    lines = (json.dumps(each) + "\n" for each in conversations())
    (folder / "prompts.jsonl").write_text("".join(lines))


def write_model(folder: Path) -> None:
    """Writes a model's folder without a model: a tokenizer that takes each word for a token."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {word for text in (*WORDS, _ANSWER) for word in text.split()}
    vocabulary = {word: number for number, word in enumerate([UNKNOWN, *sorted(words)])}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {"tokenizer": tokenizer, "tokenizer_config": settings, "config": MOE_MODEL}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
