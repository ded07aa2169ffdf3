"""Fields that other servers have and this one has not: what to use instead. No JAX.

A value that asks for nothing is taken: the neutral one, or null.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Refused(NamedTuple):
    """What to use instead of a field, and its values that ask for nothing."""

    instead: str
    harmless: tuple[Any, ...] = ()


_STRUCTURED = "use structured_outputs.{}"
_ADAPTERS = "put the name of the adapter into model"
_SAMPLING = "use top_k, top_p or min_p"
_IMAGES = "texts alone are served"
_TRANSFER = "prefill and decode run on the same devices"
_PENALTIES = "use frequency_penalty or repetition_penalty"

REFUSED: Mapping[str, Refused] = MappingProxyType(
    {
        # OpenAI
        "suffix": Refused("put the text behind the gap into the prompt", ("",)),
        "best_of": Refused("use n and logprobs, and take the best", (1,)),
        "functions": Refused("use tools", ([],)),
        "function_call": Refused("use tool_choice", ("none", "auto")),
        "audio": Refused(_IMAGES),
        "modalities": Refused(_IMAGES, (["text"],)),
        "web_search_options": Refused("give a function of your own as a tool"),
        # vLLM
        "use_beam_search": Refused("use n and logprobs, and take the best", (False,)),
        "length_penalty": Refused("there is no beam search", (1,)),
        "early_stopping": Refused("there is no beam search", (False,)),
        "detokenize": Refused("use return_token_ids", (True,)),
        "logits_processors": Refused("use logit_bias or structured_outputs", ([],)),
        "guided_json": Refused(_STRUCTURED.format("json")),
        "guided_regex": Refused(_STRUCTURED.format("regex")),
        "guided_choice": Refused(_STRUCTURED.format("choice")),
        "guided_grammar": Refused(_STRUCTURED.format("grammar")),
        "guided_json_object": Refused("use response_format", (False,)),
        "guided_whitespace_pattern": Refused(_STRUCTURED.format("regex")),
        "guided_decoding_backend": Refused("there is one backend, llguidance"),
        "structural_tag": Refused("use tools, or structured_outputs.grammar"),
        "structured_outputs.structural_tag": Refused("use tools, or structured_outputs.grammar"),
        "structured_outputs.disable_fallback": Refused("there is one backend", (False,)),
        "structured_outputs.disable_additional_properties": Refused(
            "write additionalProperties into the schema", (False,)
        ),
        "chat_template": Refused("give the server --chat-template, or send a prompt"),
        "media_io_kwargs": Refused(_IMAGES, ({},)),
        "mm_processor_kwargs": Refused(_IMAGES, ({},)),
        "prompt_embeds": Refused("send texts or token ids"),
        "kv_transfer_params": Refused(_TRANSFER),
        "ec_transfer_params": Refused(_TRANSFER),
        "vllm_xargs": Refused("there are no plugins that read it", ({},)),
        "logprob_token_ids": Refused("use top_logprobs, or allowed_token_ids", ([],)),
        "repetition_detection": Refused(_PENALTIES),
        "return_token_offsets": Refused("use return_token_ids", (False,)),
        "return_prompt_text": Refused("use return_token_ids and /detokenize", (False,)),
        "return_assistant_tokens_mask": Refused("use return_token_ids", (False,)),
        "lora": Refused(_ADAPTERS),
        "lora_path": Refused(_ADAPTERS),
        "lora_request": Refused(_ADAPTERS),
        "adapter": Refused(_ADAPTERS),
        # SGLang, llama.cpp, TGI and others
        "response_format.schema": Refused("use response_format.json_schema"),
        "json_schema": Refused("use response_format"),
        "json_object": Refused("use response_format", (False,)),
        "regex": Refused(_STRUCTURED.format("regex")),
        "ebnf": Refused(_STRUCTURED.format("grammar")),
        "grammar": Refused(_STRUCTURED.format("grammar"), ("",)),
        "choice": Refused(_STRUCTURED.format("choice")),
        "stop_regex": Refused("use stop", ([], "")),
        "no_stop_trim": Refused("use include_stop_str_in_output", (False,)),
        "return_hidden_states": Refused("answers are texts and log-probabilities", (False,)),
        "custom_logit_processor": Refused("use logit_bias or structured_outputs"),
        "typical_p": Refused(_SAMPLING, (1,)),
        "typical": Refused(_SAMPLING, (1,)),
        "top_a": Refused(_SAMPLING, (0,)),
        "tfs_z": Refused(_SAMPLING, (1,)),
        "mirostat": Refused(_SAMPLING, (0,)),
        "mirostat_mode": Refused(_SAMPLING, (0,)),
        "xtc_probability": Refused(_SAMPLING, (0,)),
        "dry_multiplier": Refused(_PENALTIES, (0,)),
        "repeat_penalty": Refused("use repetition_penalty", (1,)),
        "n_predict": Refused("use max_tokens"),
        "n_probs": Refused("use logprobs", (0,)),
        "max_new_tokens": Refused("use max_tokens"),
        "min_new_tokens": Refused("use min_tokens", (0,)),
        "top_n_tokens": Refused("use logprobs", (0,)),
    }
)
