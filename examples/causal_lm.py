"""A causal language model: pruned, evaluated, packed, and loaded again.

    python examples/causal_lm.py [MODEL] [OUT]

MODEL is a directory or a hub id; without one it is the small LLaMA that comes with the package.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import export  # teaches `from_pretrained` the packed format
from callbacks import MRPCallback
from export.to_sparse import main as to_sparse
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.embedded import STDLIB_LLAMA


def main(source: str = str(STDLIB_LLAMA), out: str = "runs/example-2of4") -> str:
    model = CausalLM(source)
    # The embedded text; for your own, give train_files and eval_files, or dataset.
    data = TextDataModule(num_samples=32, sequence_length=128, batch_size=8)
    trainer = Trainer(logger=False, limit_test_batches=8, enable_model_summary=False)
    trainer.test(model, datamodule=data)
    trainer.predict(
        model, datamodule=data, callbacks=[MRPCallback(pattern="2:4", save_dir=out, overwrite=True)]
    )
    trainer.test(model, datamodule=data)

    packed = f"{out}-sparse24"
    to_sparse([out, "--out", packed, "--overwrite"])
    loaded, tokenizer = export.load(Path(packed)).eval(), AutoTokenizer.from_pretrained(packed)
    prompt = tokenizer("import os\n\ndef ", return_tensors="pt")
    with torch.no_grad():
        written = loaded.generate(**prompt, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(written[0], skip_special_tokens=True)
    print(text)
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
