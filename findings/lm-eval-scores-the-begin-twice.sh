#!/usr/bin/env bash
# Guess: in a task that scores whole texts (loglikelihood_rolling: wikitext, pile), lm_eval gives the model one begin of
# text, and scores the tokens of the text.
# Seen in lm_eval 0.4.13 with transformers 5.23.0: with a tokenizer that puts a begin before each text (Llama, Mistral), the
# model reads it twice, and the second one is scored as if it were text. So perplexities have a term that no training has
# made small; with add_bos_token=False they have not, and both are also further from those of other programs. A tokenizer
# that puts none gets one in either case. The log-probability of one text by a small random model:
#   by default: reads [256, 256, 't', 'h', 'e'], scores 4 tokens
#   add_bos_token=False: reads [256, 't', 'h', 'e'], scores 3 tokens
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q lm_eval==0.4.13 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
cat > "$folder/try.py" <<'PY'
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGIN, TEXT = 256, "the"
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({**{letter: n for n, letter in enumerate(letters)}, "<s>": BEGIN, "</s>": 257}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, bos_token_id=BEGIN, eos_token_id=257)).eval()


def expected(tokens):
    """The log-probability of all tokens but the first."""
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    return sum(rows[place, token].item() for place, token in enumerate(tokens[1:]))


ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(TEXT,), idx=0)
for name, options, begins in (("by default", {}, 2), ("add_bos_token=False", {"add_bos_token": False}, 1)):
    judge = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", **options)
    found = judge.loglikelihood_rolling([request], disable_tqdm=True)[0]
    assert abs(found - expected([BEGIN] * begins + ids)) < 1e-3, "this has changed"
    shown = str([BEGIN] * begins + [*TEXT])
    print(f"{name}: reads {shown}, scores {begins - 1 + len(ids)} tokens")
PY
HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 "$folder/venv/bin/python" -W ignore "$folder/try.py" 2>"$folder/said" || { tail -5 "$folder/said"; exit 1; }
