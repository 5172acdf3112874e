"""A tiny Qwen2-VL with random weights, and images for it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

VOCAB = 512
SPECIAL = (
    "<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PIXELS = 56
HEADS = 4
HIDDEN = 64


def build(folder: Path) -> Path:
    """Write the checkpoint, with all files a server needs for text and images."""
    tokenizer = _tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
            "bos_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
        },
        vision_config={
            "depth": 2,
            "embed_dim": HIDDEN,
            "hidden_size": HIDDEN,
            "num_heads": HEADS,
            "mlp_ratio": 2,
            # SGLang's name for transformers' in_channels
            "in_chans": 3,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    for parameter in model.parameters():
        # large enough for the image to move the log-probabilities
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=PIXELS**2, max_pixels=4 * PIXELS**2),
        video_processor=Qwen2VLVideoProcessor(),
        tokenizer=tokenizer,
        chat_template="{{ messages }}",
    ).save_pretrained(folder)
    return folder


def picture(colour: str) -> str:
    """Return an image of one colour, as a data URL."""
    content = io.BytesIO()
    Image.new("RGB", (PIXELS, PIXELS), colour).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens first, and the word ``ti`` for token i."""
    names = [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), VOCAB))]
    words = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t100"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t100",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[2:]),
    )
