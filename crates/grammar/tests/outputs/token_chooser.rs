// SPDX-License-Identifier: Apache-2.0

//! Stand-ins for models: each chooses among the allowed tokens by a rule of its own.

use grammar::{MatchError, Matcher, MatcherStatus};
use text::EncodeOptions;

use crate::vocabularies::NamedTokenizer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenChooser {
    /// Every allowed token is equally likely.
    Indifferent,
    /// Prefers the same tokens everywhere, by one fixed logit per token.
    Stubborn,
    /// Prefers quotes, brackets, escapes, blanks and parts of characters, and ends only if nothing
    /// else is allowed.
    Hostile,
}

pub(crate) const TOKEN_CHOOSERS: [TokenChooser; 3] =
    [TokenChooser::Indifferent, TokenChooser::Stubborn, TokenChooser::Hostile];

/// A linear congruential generator.
struct ChooserRng(u64);

impl ChooserRng {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % count
    }
}

impl TokenChooser {
    /// The allowed token with the highest logit is chosen.
    fn logit(self, words: &NamedTokenizer, token: u32, seed: u64, random: &mut ChooserRng) -> u64 {
        // Fibonacci hashing gives each token a fixed logit.
        let stays = (u64::from(token) ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44;
        match self {
            TokenChooser::Indifferent => random.below(1 << 20) as u64,
            TokenChooser::Stubborn => stays,
            TokenChooser::Hostile => {
                let bytes = words.tokenizer.token_bytes(token).unwrap_or_default();
                let odd = bytes.iter().filter(|byte| !byte.is_ascii_alphanumeric()).count();
                ((odd as u64) << 20) + stays
            }
        }
    }
}

pub(crate) fn allowed_tokens(mask: &[u32]) -> Vec<u32> {
    let bits = mask.iter().enumerate().flat_map(|(word, bits)| {
        (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word as u32 * 32 + bit)
    });
    bits.collect()
}

/// The tokens of an output.
pub(crate) enum GeneratedOutput {
    Finished(Vec<u32>),
    /// The output did not end within the limit of tokens.
    Truncated(Vec<u32>),
}

pub(crate) fn generate(
    words: &NamedTokenizer,
    model: TokenChooser,
    mut matcher: Matcher,
    seed: u64,
    tokens_max: usize,
) -> Result<GeneratedOutput, MatchError> {
    let mut random = ChooserRng(seed);
    let mut output = Vec::new();
    let mut mask = Vec::new();
    while output.len() < tokens_max {
        if matcher.compute_mask(&mut mask)? == MatcherStatus::Finished {
            return Ok(GeneratedOutput::Finished(output));
        }
        let (ends, others): (Vec<u32>, Vec<u32>) =
            allowed_tokens(&mask).into_iter().partition(|&token| words.tokenizer.is_end_of_generation(token));
        let willing = match model {
            TokenChooser::Hostile => false,
            _ => output.len() > tokens_max / 2 || random.below(4) == 0,
        };
        if !ends.is_empty() && (willing || others.is_empty()) {
            return Ok(GeneratedOutput::Finished(output));
        }
        let best = others.into_iter().max_by_key(|&token| model.logit(words, token, seed, &mut random));
        let token = best.expect("a mask allows at least one token");
        output.push(token);
        matcher.accept(token)?;
    }
    Ok(GeneratedOutput::Truncated(output))
}

/// Whether the grammar accepts all of `text`, as the tokenizer encodes it, and may end there.
pub(crate) fn accepts_text(words: &NamedTokenizer, mut matcher: Matcher, text: &str) -> bool {
    let mut mask = Vec::new();
    for token in words.tokenizer.encode(text, EncodeOptions::default()).unwrap() {
        if matcher.compute_mask(&mut mask).unwrap() == MatcherStatus::Finished
            || !allowed_tokens(&mask).contains(&token)
        {
            return false;
        }
        matcher.accept(token).unwrap();
    }
    let next = matcher.compute_mask(&mut mask).unwrap();
    next == MatcherStatus::Finished
        || allowed_tokens(&mask).iter().any(|&token| words.tokenizer.is_end_of_generation(token))
}
