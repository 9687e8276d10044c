"""Text-only processor of the tiny Kimi-K2.5: SGLang's class asks the checkpoint for one (--trust-remote-code)."""

from transformers import AutoTokenizer
from transformers.image_processing_utils import BaseImageProcessor


class _Media(BaseImageProcessor):
    """Holds the settings that the serving class reads at start; no image is ever processed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = {
            "patch_size": 14,
            "merge_kernel_size": 2,
            "in_patch_limit": 4096,
            "patch_limit_on_one_side": 512,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }


class TinyKimiProcessor:
    """The tokenizer, in the shape of a multimodal processor."""

    attributes = ("tokenizer",)

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.media_processor = self.image_processor = _Media()

    @classmethod
    def from_pretrained(cls, path, *_args, **_kwargs):
        """Load the tokenizer of the directory `path`."""
        return cls(AutoTokenizer.from_pretrained(path))

    @classmethod
    def register_for_auto_class(cls, *_args, **_kwargs):
        """Called by transformers for remote code; there is nothing to register."""

    def __call__(self, text=None, **_kwargs):
        """Tokenize `text`; images are not supported."""
        return self.tokenizer(text, return_tensors="pt")
