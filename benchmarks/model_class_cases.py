"""Real model classes: how each is made, small and with random weights, and what it is fed.

Covers: classes of ``transformers`` by family, with dropout as configured; nothing is downloaded. Beside the plain ones some are in
channels_last, in bf16, under bf16 autocast, with gradient checkpointing, with tied embeddings, with a frozen base. ``torchvision`` and
``timm`` are not built for every torch (nor for the one this was written on): their classes join where they import.
Does not cover: how a class is judged (model_classes.py).
"""

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 99
IMAGE_TOKEN = VOCABULARY - 1  # stands for a patch of an image

Inputs = dict[str, Any]
Settings = dict[str, Any]


# ---- how models are made and fed


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is done to a model before it trains, and around each of its forwards."""

    name: str
    prepare: Callable[[nn.Module], object] = lambda model: None
    around: Callable[[torch.device], AbstractContextManager[object]] = lambda device: nullcontext()


PLAIN = Variant(name="")
CHANNELS_LAST = Variant(name="channels_last", prepare=lambda model: model.to(memory_format=torch.channels_last))
BF16 = Variant(name="bf16", prepare=lambda model: model.bfloat16())
AUTOCAST = Variant(name="bf16 autocast", around=lambda device: torch.autocast(device.type, torch.bfloat16))
FROZEN_BASE = Variant(name="frozen base", prepare=lambda model: model.base_model.requires_grad_(False))


def enable_checkpointing(model: nn.Module) -> None:
    # Newer transformers have a new name for it, and warn about the old one.
    enable = "activation_checkpointing_enable" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing_enable"
    getattr(model, enable)()


CHECKPOINTED = Variant(name="checkpointed", prepare=enable_checkpointing)


@dataclass(frozen=True)
class Case:
    """One model class: how it is made, and what it is fed."""

    family: str
    cls: str
    variant: Variant
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    @property
    def name(self) -> str:
        """Name the class, and the variant where it is not the plain one."""
        return f"{self.cls} [{self.variant.name}]" if self.variant.name else self.cls


def transformers_case(family: str, cls: str, variant: Variant, inputs: Callable[[], Inputs], settings: Settings) -> Case:
    def make() -> nn.Module:
        model_class = getattr(transformers, cls)
        return model_class(model_class.config_class(**settings))

    return Case(family, cls, variant, make, inputs)


def tokens(length: int = 12) -> Tensor:
    return torch.randint(3, IMAGE_TOKEN, (2, length))


def pixels() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def next_token_inputs() -> Inputs:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def masked_token_inputs() -> Inputs:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, -3:] = 0  # the second sequence is padded
    return {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def translation_inputs() -> Inputs:
    return {"input_ids": tokens(), "labels": tokens(8)}


def image_inputs() -> Inputs:
    return {"pixel_values": pixels(), "labels": torch.randint(5, (2,))}


def unlabelled_image_inputs() -> Inputs:
    return {"pixel_values": pixels()}


def boxes_inputs() -> Inputs:
    labels = [{"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) / 2 + 0.2} for _ in range(2)]
    return {"pixel_values": pixels(), "labels": labels}


def waveform_inputs() -> Inputs:
    return {"input_values": torch.randn(2, 2000), "labels": torch.randint(3, 30, (2, 3))}


def spectrogram_inputs() -> Inputs:
    return {"input_features": torch.randn(2, 16, 40), "labels": tokens(8)}


def spectrogram_class_inputs() -> Inputs:
    return {"input_values": torch.randn(2, 40, 16), "labels": torch.randint(5, (2,))}


def caption_inputs() -> Inputs:
    return {"input_ids": tokens(), "pixel_values": pixels(), "return_loss": True}


def image_in_text_inputs() -> Inputs:
    ids = tokens(24)
    ids[:, 2:18] = IMAGE_TOKEN  # 16 patches
    return {"input_ids": ids, "pixel_values": pixels(), "labels": ids}


# ---- the classes: each family's common settings, then what one class needs beside or instead of them


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL_TEXT = SMALL | {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL_VISION = SMALL | {"image_size": 32, "patch_size": 8}
SMALL_SPEECH = SMALL | {
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 5),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 4,
}
SMALL_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "max_position_embeddings": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
SMALL_T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
SMALL_CONV = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
GROUPED_QUERY = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
ROUTED_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
# Reformer reseeds torch from the clock in every layer: without this it differs from run to run.
REPRODUCIBLE = {"hash_seed": 0, "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
LATENT_ATTENTION = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LINEAR_ATTENTION = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def decoder(cls: str, variant: Variant = PLAIN, **settings: Any) -> Case:
    return transformers_case("decoder", cls, variant, next_token_inputs, SMALL_TEXT | settings)


def moe(cls: str, variant: Variant = PLAIN, **settings: Any) -> Case:
    return transformers_case("mixture of experts", cls, variant, next_token_inputs, SMALL_TEXT | EXPERTS | settings)


def recurrent(cls: str, variant: Variant = PLAIN, **settings: Any) -> Case:
    return transformers_case("state space", cls, variant, next_token_inputs, SMALL_TEXT | settings)


def encoder(cls: str, variant: Variant = PLAIN, **settings: Any) -> Case:
    return transformers_case("encoder", cls, variant, masked_token_inputs, SMALL_TEXT | settings)


def seq2seq(cls: str, variant: Variant = PLAIN, **settings: Any) -> Case:
    return transformers_case("encoder-decoder", cls, variant, translation_inputs, SMALL_SEQ2SEQ | settings)


def vision(cls: str, variant: Variant = PLAIN, inputs: Callable[[], Inputs] = image_inputs, **settings: Any) -> Case:
    return transformers_case("vision", cls, variant, inputs, SMALL_VISION | {"num_labels": 5} | settings)


def convolutional(cls: str, variant: Variant = PLAIN, **settings: Any) -> Case:
    return transformers_case("vision", cls, variant, image_inputs, {"num_labels": 5} | settings)


def audio(cls: str, variant: Variant = PLAIN, inputs: Callable[[], Inputs] = waveform_inputs, **settings: Any) -> Case:
    return transformers_case("audio", cls, variant, inputs, settings)


def multimodal(cls: str, variant: Variant = PLAIN, inputs: Callable[[], Inputs] = caption_inputs, **settings: Any) -> Case:
    return transformers_case("multimodal", cls, variant, inputs, {"text_config": SMALL_TEXT, "vision_config": SMALL_VISION} | settings)


CASES = [
    decoder("LlamaForCausalLM", num_key_value_heads=2),
    decoder("LlamaForCausalLM", AUTOCAST, num_key_value_heads=2),
    decoder("LlamaForCausalLM", CHECKPOINTED, num_key_value_heads=2),
    decoder("Qwen2ForCausalLM", num_key_value_heads=2, tie_word_embeddings=True),
    decoder("Qwen3ForCausalLM", **GROUPED_QUERY),
    decoder("GemmaForCausalLM", num_key_value_heads=1, head_dim=8),
    decoder("Gemma2ForCausalLM", **GROUPED_QUERY, sliding_window=4),
    decoder("Gemma3ForCausalLM", **GROUPED_QUERY, sliding_window=4),
    decoder("MistralForCausalLM", num_key_value_heads=2, sliding_window=4),
    decoder("GPT2LMHeadModel"),
    decoder("GPTNeoXForCausalLM"),
    decoder("GPTBigCodeForCausalLM"),
    decoder("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    decoder("BloomForCausalLM"),
    decoder("FalconForCausalLM"),
    decoder("PhiForCausalLM"),
    decoder("Phi3ForCausalLM", num_key_value_heads=2),
    decoder("OlmoForCausalLM"),
    decoder("Olmo2ForCausalLM"),
    decoder("StableLmForCausalLM", num_key_value_heads=4),
    decoder("CohereForCausalLM"),
    decoder("GraniteForCausalLM"),
    moe("MixtralForCausalLM", num_key_value_heads=2),
    moe("Qwen2MoeForCausalLM", num_key_value_heads=2),
    moe("Qwen3MoeForCausalLM", **GROUPED_QUERY, output_router_logits=True),
    moe("Qwen3MoeForCausalLM", CHECKPOINTED, **GROUPED_QUERY),
    moe("OlmoeForCausalLM"),
    moe("DeepseekV2ForCausalLM", **LATENT_ATTENTION, **ROUTED_EXPERTS),
    moe("DeepseekV3ForCausalLM", **LATENT_ATTENTION, **ROUTED_EXPERTS),
    moe("DeepseekV3ForCausalLM", BF16, **LATENT_ATTENTION, **ROUTED_EXPERTS),
    moe("Glm4MoeForCausalLM", **GROUPED_QUERY, **ROUTED_EXPERTS),
    moe("GptOssForCausalLM", **GROUPED_QUERY, sliding_window=4),
    moe("JetMoeForCausalLM", num_key_value_heads=2, kv_channels=8),
    moe("GraniteMoeForCausalLM", num_key_value_heads=2),
    recurrent("MambaForCausalLM", state_size=4),
    recurrent("Mamba2ForCausalLM", state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=4),
    recurrent("FalconMambaForCausalLM", state_size=4),
    recurrent("RwkvForCausalLM", attention_hidden_size=32, context_length=32),
    recurrent("RecurrentGemmaForCausalLM", num_hidden_layers=3, lru_width=32, attention_window_size=4, num_key_value_heads=1),
    recurrent("JambaForCausalLM", num_key_value_heads=2, mamba_d_state=4, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
    recurrent("BambaForCausalLM", num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_state=4, mamba_chunk_size=4),
    recurrent("Qwen3NextForCausalLM", **GROUPED_QUERY, **EXPERTS, **LINEAR_ATTENTION, layer_types=["linear_attention", "full_attention"]),
    recurrent("Lfm2ForCausalLM", num_key_value_heads=2, layer_types=["conv", "full_attention"]),
    encoder("BertForMaskedLM"),
    encoder("BertForMaskedLM", AUTOCAST),
    encoder("BertForMaskedLM", FROZEN_BASE),
    encoder("RobertaForMaskedLM"),
    encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("ModernBertForMaskedLM", cls_token_id=1, sep_token_id=2),
    encoder("ElectraForMaskedLM", embedding_size=16),
    encoder("AlbertForMaskedLM", embedding_size=16),
    encoder("DistilBertForMaskedLM", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    encoder("LongformerForMaskedLM", attention_window=4),
    encoder("FNetForMaskedLM"),
    encoder(
        "ReformerForMaskedLM",
        is_decoder=False,
        attn_layers=["local", "lsh"],
        axial_pos_embds_dim=(8, 24),
        axial_pos_shape=(3, 4),
        attention_head_size=8,
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        num_buckets=2,
        **REPRODUCIBLE,
    ),
    encoder("XLNetLMHeadModel", d_head=8, d_inner=64),
    seq2seq("T5ForConditionalGeneration", **SMALL_T5),
    seq2seq("T5ForConditionalGeneration", CHECKPOINTED, **SMALL_T5),
    seq2seq("BartForConditionalGeneration"),
    seq2seq("MBartForConditionalGeneration"),
    seq2seq("PegasusForConditionalGeneration"),
    seq2seq("MarianMTModel"),
    vision("ViTForImageClassification"),
    vision("Dinov2ForImageClassification"),
    vision(
        "ViTMAEForPreTraining",
        inputs=unlabelled_image_inputs,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
    ),
    convolutional("SwinForImageClassification", image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4),
    convolutional("SegformerForImageClassification", num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2]),
    convolutional("ResNetForImageClassification", **SMALL_CONV),
    convolutional("ResNetForImageClassification", CHANNELS_LAST, **SMALL_CONV),
    convolutional("ConvNextV2ForImageClassification", **SMALL_CONV),
    convolutional("ConvNextV2ForImageClassification", CHANNELS_LAST, **SMALL_CONV),
    convolutional("MobileNetV2ForImageClassification", CHANNELS_LAST, depth_multiplier=0.25),
    vision(
        "DetrForObjectDetection",
        inputs=boxes_inputs,
        **SMALL_SEQ2SEQ,
        num_queries=8,
        use_timm_backbone=False,
        backbone_config={"model_type": "resnet", **SMALL_CONV},
    ),
    audio("Wav2Vec2ForCTC", **SMALL_SPEECH),
    audio("HubertForCTC", **SMALL_SPEECH),
    audio("WavLMForCTC", **SMALL_SPEECH),
    audio(
        "ASTForAudioClassification", inputs=spectrogram_class_inputs, **SMALL, num_mel_bins=16, max_length=40, patch_size=8, num_labels=5
    ),
    audio(
        "WhisperForConditionalGeneration",
        inputs=spectrogram_inputs,
        **SMALL_SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=16,
    ),
    multimodal("CLIPModel", projection_dim=16),
    multimodal("SiglipModel"),
    multimodal("BlipModel", projection_dim=16),
    multimodal(
        "LlavaForConditionalGeneration",
        inputs=image_in_text_inputs,
        text_config=SMALL_TEXT | {"model_type": "llama"},
        vision_config=SMALL_VISION | {"model_type": "clip_vision_model"},
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    ),
]


def vision_library_cases() -> Iterable[Case]:
    """Make cases of ``torchvision`` and ``timm``, as far as these import beside this torch."""
    for library, factory, variant in (
        ("torchvision.models", "resnet18", CHANNELS_LAST),
        ("torchvision.models", "densenet121", PLAIN),
        ("torchvision.models", "mobilenet_v3_small", CHANNELS_LAST),
        ("timm.models", "efficientnet_b0", CHANNELS_LAST),
        ("timm.models", "vit_tiny_patch16_224", PLAIN),
    ):
        try:
            make = getattr(importlib.import_module(library), factory)
        except (ImportError, RuntimeError):  # not installed, or built for another torch, so that its operators do not register
            continue
        size = 224 if "vit" in factory else 64
        yield Case(
            "vision", factory, variant, lambda make=make: make(num_classes=5), lambda size=size: {"x": torch.randn(2, 3, size, size)}
        )


def available_cases() -> list[Case]:
    """Return the cases this machine can run: an older ``transformers`` lacks the newest classes."""
    names = set(dir(transformers))  # hasattr would import every one of them
    return [case for case in CASES if case.cls in names] + list(vision_library_cases())
