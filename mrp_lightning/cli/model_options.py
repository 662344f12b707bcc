"""The options by which commands are told of a model."""

import argparse


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take `--model`, and what says where and how it is read."""
    parser.add_argument("--model", required=True, help="a model directory, hub id or GGUF file")
    parser.add_argument("--gguf-file", metavar="NAME", help="the GGUF file in that directory")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
