// SPDX-License-Identifier: Apache-2.0

//! A vocabulary of the real model's size that can tokenize any text: all bytes, a few merges, the
//! family's special tokens at their real ids, and made-up words.

use super::shapes::{ModelFamily, ModelShape};
use gguf::{MetadataBuilder, WriteError};

/// GGUF token types.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

/// Merges in the byte alphabet, in rank order. Every result is a token.
const MERGES: [(&str, &str); 16] = [
    ("Ġ", "Ġ"),
    ("ĠĠ", "ĠĠ"),
    ("Ġ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("r", "e"),
    ("Ġ", "a"),
    ("o", "n"),
    ("e", "r"),
    ("Ġt", "he"),
    ("Ġ", "s"),
    ("a", "t"),
    ("e", "n"),
    ("o", "u"),
    ("in", "g"),
    ("Ġ", "="),
];

/// Chat templates of the families.
const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const LLAMA3: &str = "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}";

const GEMMA3: &str = "{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}";

/// Special tokens, with their real distance from the first one. The real ones of gemma3 begin at 0,
/// in a SentencePiece vocabulary.
const QWEN3_SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const GEMMA3_SPECIALS: [&str; 3] = ["<eos>", "<start_of_turn>", "<end_of_turn>"];
const LLAMA3_SPECIALS: [&str; 8] = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
];

pub(super) fn put(shape: &ModelShape, metadata: &mut MetadataBuilder) -> Result<(), WriteError> {
    let (specials, pre, template): (&[&str], _, _) = match shape.family {
        ModelFamily::Qwen3 => (&QWEN3_SPECIALS, "qwen2", CHATML),
        ModelFamily::Llama3 => (&LLAMA3_SPECIALS, "llama-bpe", LLAMA3),
        ModelFamily::Gemma3 => (&GEMMA3_SPECIALS, "qwen2", GEMMA3),
    };
    let first_special = shape.first_special as usize;
    let last_special = first_special + specials.len();
    let tokens = tokens(shape.vocabulary as usize, first_special, specials);
    let is_special = |id: usize| (first_special..last_special).contains(&id);
    let types: Vec<i32> = (0..tokens.len()).map(|id| if is_special(id) { CONTROL } else { NORMAL }).collect();
    let merges: Vec<String> = MERGES.iter().map(|(left, right)| format!("{left} {right}")).collect();

    metadata.put("tokenizer.ggml.model", "gpt2")?;
    metadata.put("tokenizer.ggml.pre", pre)?;
    metadata.put("tokenizer.ggml.tokens", &tokens[..])?;
    metadata.put("tokenizer.ggml.token_type", &types[..])?;
    metadata.put("tokenizer.ggml.merges", &merges[..])?;
    let first_special = first_special as u32;
    match shape.family {
        ModelFamily::Qwen3 | ModelFamily::Gemma3 => {
            metadata.put("tokenizer.ggml.bos_token_id", first_special)?;
            metadata.put("tokenizer.ggml.eos_token_id", first_special + 2)?;
            metadata.put("tokenizer.ggml.padding_token_id", first_special)?;
            metadata.put("tokenizer.ggml.add_bos_token", false)?;
        }
        ModelFamily::Llama3 => {
            metadata.put("tokenizer.ggml.bos_token_id", first_special)?;
            metadata.put("tokenizer.ggml.eos_token_id", first_special + 1)?;
            metadata.put("tokenizer.ggml.eot_token_id", first_special + 5)?;
            metadata.put("tokenizer.ggml.add_bos_token", true)?;
        }
    }
    metadata.put("tokenizer.chat_template", template)
}

fn tokens(count: usize, first_special: usize, specials: &[&str]) -> Vec<String> {
    let merged = MERGES.iter().map(|(left, right)| format!("{left}{right}"));
    let mut words = byte_alphabet().map(String::from).chain(merged).chain((0..).map(made_up_word));
    let mut tokens: Vec<String> = words.by_ref().take(first_special).collect();
    tokens.extend(specials.iter().map(|&special| special.to_owned()));
    tokens.extend(words.take(count - tokens.len()));
    tokens
}

/// The characters that represent the 256 bytes in byte-level vocabularies. Printable bytes
/// represent themselves and come first, as in real vocabularies; the others are U+0100 and up.
fn byte_alphabet() -> impl Iterator<Item = char> {
    let printable = (33..=126_u8).chain(161..=172).chain(174..=255).map(char::from);
    printable.chain(('\u{100}'..).take(68))
}

/// Distinct words of four syllables: " babababe", " babababi", and so on.
fn made_up_word(number: usize) -> String {
    const CONSONANTS: &[u8; 16] = b"bdfghjklmnprstvz";
    const VOWELS: &[u8; 5] = b"aeiou";
    const SYLLABLES: usize = CONSONANTS.len() * VOWELS.len();
    let mut word = String::from("Ġ");
    for place in (0..4).rev() {
        let syllable = number / SYLLABLES.pow(place) % SYLLABLES;
        word.push(char::from(CONSONANTS[syllable / VOWELS.len()]));
        word.push(char::from(VOWELS[syllable % VOWELS.len()]));
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn tokens_are_unique_and_stand_where_the_real_ones_do() {
        let shape = ModelShape::find("qwen3-0.6b").unwrap();
        let tokens = tokens(shape.vocabulary as usize, shape.first_special as usize, &QWEN3_SPECIALS);
        assert_eq!(tokens.len(), 151_936);
        assert_eq!(tokens.iter().collect::<HashSet<_>>().len(), tokens.len());
        assert_eq!((&tokens[151_643][..], &tokens[151_645][..]), ("<|endoftext|>", "<|im_end|>"));
        assert_eq!((&tokens[0][..], &tokens[187][..]), ("!", "ÿ"));
        assert!(tokens[..256].contains(&"Ġ".to_owned()) && tokens[..256].contains(&"Ċ".to_owned()));
    }

    #[test]
    fn every_merge_makes_a_token_of_tokens() {
        let tokens: HashSet<String> = tokens(1024, 1016, &LLAMA3_SPECIALS).into_iter().collect();
        for (left, right) in MERGES {
            for part in [left, right, &format!("{left}{right}")] {
                assert!(tokens.contains(part), "{part}");
            }
        }
    }
}
