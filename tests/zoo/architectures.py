"""Architectures of timm and transformers, small and random: one line adds one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from zoo.torchvision import stand_in

ROWS, TOKENS, VOCABULARY, END = 2, 7, 50, 49


@dataclass(frozen=True)
class Architecture:
    """A network of some library and inputs for it; ``usual`` ones are part of ``make test``."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    usual: bool = False

    def __str__(self) -> str:
        return self.name


def text(**more: Any) -> dict[str, Tensor]:
    """Return tokens of two sentences, the second of which is shorter."""
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, **more}


def tokens() -> Tensor:
    found = torch.randint(3, END, (ROWS, TOKENS))
    found[:, -3] = END
    return found


def pair() -> dict[str, Tensor]:
    return text(decoder_input_ids=tokens())


def image(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, size, size)}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(ROWS, 400)}


def both() -> dict[str, Tensor]:
    return text() | image()


def hugging(
    name: str,
    inputs: Callable[[], Any] = text,
    *,
    usual: bool = False,
    parts: dict[str, dict[str, Any]] | None = None,
    **options: Any,
) -> Architecture:
    """Return a model of transformers; ``parts`` are configurations inside the configuration."""

    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**options, **(parts or {})))

    return Architecture(name, build, inputs, usual)


def pictures(name: str, size: int, **options: Any) -> Architecture:
    """Return a model of timm for images of some size."""

    def build() -> nn.Module:
        with stand_in():
            import timm
        return timm.create_model(name, num_classes=5, **options)

    return Architecture(name, build, lambda: torch.randn(ROWS, 3, size, size))


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
WIDE = {**LAYERS, "intermediate_size": 24}
WORDS = {**WIDE, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
FEW = {**WORDS, "num_key_value_heads": 1, "pad_token_id": 0}
PATCHES = {**WIDE, "image_size": 16, "patch_size": 4}
GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
T5 |= {"num_heads": 2, "decoder_start_token_id": 0}
BART = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24}
BART |= {"decoder_ffn_dim": 24, "max_position_embeddings": 32, "eos_token_id": END}
WAVES = {**WIDE, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
WAVES |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "vocab_size": 20}
WAVES |= {"num_conv_pos_embedding_groups": 2}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
TOWERS = {"text_config": {**WORDS, "bos_token_id": 0, "eos_token_id": END}}
TOWERS |= {"vision_config": PATCHES}
GROUPS = {f"{part}_groups": 2 for part in ("q", "k", "v", "post_attention", "intermediate")}
GROUPS |= {"output_groups": 2}
STATES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}

TRANSFORMERS = [
    hugging("BertForSequenceClassification", usual=True, **WORDS),
    hugging("BertForMaskedLM", **WORDS),
    hugging("RobertaForSequenceClassification", **WORDS),
    hugging("DistilBertForSequenceClassification", vocab_size=50, dim=16, n_layers=2, n_heads=2),
    hugging("AlbertForSequenceClassification", usual=True, embedding_size=8, **WORDS),
    hugging("ElectraForSequenceClassification", embedding_size=8, **WORDS),
    hugging("DebertaV2ForSequenceClassification", **WORDS),
    hugging("MPNetForSequenceClassification", **WORDS),
    hugging("ModernBertForSequenceClassification", **WORDS, pad_token_id=0),
    hugging("GPT2LMHeadModel", usual=True, **GPT),
    hugging("GPT2ForSequenceClassification", pad_token_id=0, **GPT),
    hugging("GPTNeoXForCausalLM", **WORDS),
    hugging("OPTForCausalLM", **{**WORDS, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    hugging("BloomForCausalLM", vocab_size=50, hidden_size=16, n_layer=2, n_head=2),
    hugging("LlamaForCausalLM", usual=True, **FEW),
    hugging("LlamaForSequenceClassification", **FEW),
    hugging("MistralForCausalLM", **FEW),
    hugging("Qwen2ForCausalLM", **FEW),
    hugging("Qwen3ForCausalLM", head_dim=8, **FEW),
    hugging("GemmaForCausalLM", head_dim=8, **FEW),
    hugging("PhiForCausalLM", **WORDS),
    hugging("T5EncoderModel", **T5),
    hugging("T5ForConditionalGeneration", pair, usual=True, **T5),
    hugging("BartForConditionalGeneration", pair, **BART),
    hugging("BartForSequenceClassification", **BART),
    hugging("MambaForCausalLM", **STATES),
    hugging("Mamba2ForCausalLM", **STATES, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    hugging("ViTForImageClassification", image, usual=True, **PATCHES),
    hugging("DeiTForImageClassification", image, **PATCHES),
    hugging("BeitForImageClassification", image, **PATCHES),
    hugging("Dinov2ForImageClassification", image, **PATCHES),
    hugging("ConvNextForImageClassification", lambda: image(32), **STAGES),
    hugging("ResNetForImageClassification", lambda: image(32), embedding_size=8, **STAGES),
    hugging("SwinForImageClassification", image, image_size=16, patch_size=2, window_size=4,
            embed_dim=8, depths=[1, 2], num_heads=[1, 2]),
    hugging("Wav2Vec2ForSequenceClassification", sound, **WAVES),
    hugging("HubertForSequenceClassification", sound, **WAVES),
    hugging("RoFormerForSequenceClassification", embedding_size=16, **WORDS),
    hugging("FNetForSequenceClassification", **WORDS, tpu_short_seq_length=TOKENS),
    hugging("ConvBertForSequenceClassification", embedding_size=16, **WORDS),
    hugging("SqueezeBertForSequenceClassification", embedding_size=16, **WORDS, **GROUPS),
    hugging("NystromformerForSequenceClassification", **WORDS, num_landmarks=7,
            segment_means_seq_len=7),
    hugging("GPTNeoForCausalLM", vocab_size=50, hidden_size=16, num_layers=2, num_heads=2,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=32),
    hugging("GPTJForCausalLM", **GPT, rotary_dim=4),
    hugging("FalconForCausalLM", **WORDS),
    hugging("MixtralForCausalLM", **FEW, num_local_experts=3),
    hugging("Qwen2MoeForCausalLM", **FEW, num_experts=3, num_experts_per_tok=2,
            moe_intermediate_size=8, shared_expert_intermediate_size=8),
    hugging("Phi3ForCausalLM", **FEW),
    hugging("Gemma2ForCausalLM", head_dim=8, **FEW),
    hugging("SegformerForImageClassification", lambda: image(32), num_encoder_blocks=2,
            depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
            strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    hugging("PoolFormerForImageClassification", lambda: image(32), depths=[1, 1, 1, 1],
            hidden_sizes=[8, 8, 16, 16]),
    hugging("RegNetForImageClassification", lambda: image(32), embedding_size=8, groups_width=4,
            **STAGES),
    hugging("CLIPModel", both, parts=TOWERS, projection_dim=8),
    hugging("CLIPTextModelWithProjection", projection_dim=8, **TOWERS["text_config"]),
    hugging("CLIPVisionModelWithProjection", image, projection_dim=8, **PATCHES),
]  # fmt: skip

FOUR = {"depths": (1, 1, 1, 1)}
DIMS = {"dims": (8, 16, 24, 32)}
TWO = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32}
SWIN = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 4)}
ONES = {"layers": (1, 1, 1, 1)}

TIMM = [
    pictures("resnet10t", 32, **ONES, channels=(8, 16, 24, 32)),
    pictures("resnetv2_18", 32, **ONES, channels=(8, 16, 24, 32)),
    pictures("seresnet18", 32, **ONES, channels=(8, 16, 24, 32)),
    pictures("densenet121", 64, block_config=(1, 2, 1, 1), growth_rate=8),
    pictures("mobilenetv3_small_050", 32),
    pictures("mobilenetv2_035", 32),
    pictures("convnext_atto", 32, **FOUR, **DIMS),
    pictures("convnextv2_atto", 32, **FOUR, **DIMS),
    pictures("inception_next_atto", 32, **FOUR, **DIMS),
    pictures("mambaout_femto", 32, **FOUR, **DIMS),
    pictures("starnet_s050", 32, **FOUR),
    pictures("edgenext_xx_small", 64, **FOUR, **DIMS),
    pictures("dla46x_c", 32),
    pictures("skresnet18", 32),
    pictures("nf_resnet26", 32),
    pictures("botnet26t_256", 64, img_size=64),
    pictures("poolformer_s12", 32, layers=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32)),
    pictures("mobilevit_xxs", 64),
    pictures("visformer_tiny", 64, embed_dim=32, depth=(1, 1, 1), img_size=64),
    pictures("swiftformer_xs", 64, embed_dims=(8, 16, 16, 32), **ONES),
    pictures("davit_tiny", 64, embed_dims=(8, 16, 24, 32), **FOUR, num_heads=(1, 2, 2, 2)),
    pictures("vit_tiny_patch16_224", 32, **TWO),
    pictures("deit_tiny_distilled_patch16_224", 32, **TWO),
    pictures("beit_base_patch16_224", 32, **TWO),
    pictures("vit_relpos_small_patch16_224", 32, **TWO),
    pictures("cait_xxs24_224", 32, **TWO),
    pictures("convit_tiny", 32, **TWO),
    pictures("xcit_nano_12_p16_224", 64, **{**TWO, "img_size": 64}),
    pictures("vit_tiny_r_s16_p8_224", 64, **{**TWO, "img_size": 64}),
    pictures("eva02_tiny_patch14_224", 28, **{**TWO, "img_size": 28}),
    pictures("hiera_tiny_224", 64, embed_dim=16, num_heads=1, stages=(1,) * 4, img_size=(64, 64)),
    pictures("swin_tiny_patch4_window7_224", 56, **SWIN, img_size=56),
    pictures("swinv2_tiny_window8_256", 64, **SWIN, img_size=64, window_size=4),
    pictures("twins_svt_small", 64, embed_dims=(16, 32, 32, 64), **FOUR, num_heads=(1, 1, 2, 2),
             img_size=64),
    pictures("crossvit_tiny_240", 240, embed_dim=(16, 32), num_heads=(2, 2), depth=((1, 1, 0),)),
    pictures("levit_128s", 64, img_size=64, embed_dim=(16, 24, 32), depth=(1, 1, 1),
             num_heads=(2, 2, 2), key_dim=8),
    pictures("sequencer2d_s", 56, img_size=56, **ONES, embed_dims=(16, 32, 32, 32),
             hidden_sizes=(8, 8, 8, 8)),
]  # fmt: skip
