// SPDX-License-Identifier: Apache-2.0

//! Conversations of a file in the JSON form of ShareGPT.

use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::SliceRandom;
use serde::Deserialize;

use super::prose::TokenScale;

/// Tokens of a prompt with its answer: the bounds of vLLM's benchmark.
pub(crate) const SHAREGPT_TOKENS_MAX: u32 = 2048;
const PROMPT_TOKENS_MAX: u32 = 1024;
const TOKENS_MIN: u32 = 4;

/// The first prompt of a conversation, and how long its answer is.
#[derive(Clone, Debug, PartialEq)]
pub struct ShareGptPair {
    pub prompt: String,
    pub output_tokens: u32,
}

/// Why a file gives no prompts.
#[derive(Debug, thiserror::Error)]
pub enum ShareGptError {
    #[error("it is not JSON in the form of ShareGPT")]
    Json(#[from] serde_json::Error),
    #[error(
        "none of its {conversations} conversations has a prompt and an answer of 4 tokens or more, with \
         at most {tokens_max} together"
    )]
    Empty { conversations: usize, tokens_max: u32 },
}

#[derive(Deserialize)]
struct StoredConversation {
    #[serde(default)]
    conversations: Vec<StoredMessage>,
}

#[derive(Deserialize)]
struct StoredMessage {
    value: String,
}

/// Reads `[{"conversations": [{"value": PROMPT}, {"value": ANSWER}, ...]}, ...]`.
///
/// As in vLLM's benchmark, only the first two messages count, and pairs that are very short or long
/// are left out. Lengths are estimates by `scale`: the server has the tokenizer. The order is
/// random by `seed`.
pub fn read_sharegpt(
    json: &[u8],
    scale: &TokenScale,
    context_tokens: Option<u32>,
    seed: u64,
) -> Result<Vec<ShareGptPair>, ShareGptError> {
    let stored: Vec<StoredConversation> = serde_json::from_slice(json)?;
    let tokens_max = context_tokens.unwrap_or(u32::MAX).min(SHAREGPT_TOKENS_MAX);
    let conversations = stored.len();
    let pair = |stored: StoredConversation| {
        let mut messages = stored.conversations.into_iter();
        let (prompt, answer) = (messages.next()?.value, messages.next()?.value);
        let (input_tokens, output_tokens) = (scale.text_tokens(&prompt), scale.text_tokens(&answer));
        let fits = input_tokens.min(output_tokens) >= TOKENS_MIN
            && input_tokens <= PROMPT_TOKENS_MAX
            && input_tokens + output_tokens <= tokens_max;
        fits.then_some(ShareGptPair { prompt, output_tokens })
    };
    let mut pairs: Vec<ShareGptPair> = stored.into_iter().filter_map(pair).collect();
    if pairs.is_empty() {
        return Err(ShareGptError::Empty { conversations, tokens_max });
    }
    pairs.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str, context_tokens: Option<u32>, seed: u64) -> Result<Vec<ShareGptPair>, ShareGptError> {
        read_sharegpt(json.as_bytes(), &TokenScale::TYPICAL, context_tokens, seed)
    }

    fn stored(prompt: usize, answer: usize) -> String {
        let (prompt, answer) = ("p".repeat(prompt), "a".repeat(answer));
        format!(
            r#"{{"id": "1", "conversations": [{{"from": "human", "value": "{prompt}"}}, {{"from": "gpt", "value": "{answer}"}}, {{"from": "human", "value": "more"}}]}}"#
        )
    }

    #[test]
    fn the_first_prompt_and_the_length_of_its_answer_are_taken() {
        let pairs = read(&format!("[{}]", stored(90, 450)), None, 0).unwrap();
        assert_eq!(pairs, [ShareGptPair { prompt: "p".repeat(90), output_tokens: 100 }]);
    }

    #[test]
    fn pairs_that_are_short_long_or_incomplete_are_left_out() {
        let lone = r#"{"conversations": [{"from": "human", "value": "hello, is there anybody"}]}"#;
        let all = [stored(4, 450), stored(90, 4), stored(6000, 90), stored(90, 9900), lone.to_owned()];
        let error = read(&format!("[{}]", all.join(",")), None, 0).unwrap_err();
        assert!(matches!(error, ShareGptError::Empty { conversations: 5, tokens_max: 2048 }), "{error}");
        assert!(read(&format!("[{}]", stored(90, 450)), Some(64), 0).is_err(), "above the context");
    }

    #[test]
    fn the_seed_decides_the_order() {
        let all: Vec<String> = (20..60).map(|bytes| stored(bytes, 90)).collect();
        let json = format!("[{}]", all.join(","));
        let order = |seed| read(&json, None, seed).unwrap();
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        assert_eq!(order(2).len(), 40);
    }

    #[test]
    fn other_files_are_refused() {
        for json in ["", "{}", "[1]", r#"[{"conversations": [{"from": "human"}]}]"#] {
            assert!(matches!(read(json, None, 0), Err(ShareGptError::Json(_))), "{json}");
        }
    }
}
