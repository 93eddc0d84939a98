//! Models without weights, from one that is indifferent to one that would rather write something else.

use grammar::{MatchError, Matcher, Next};
use text::EncodeOptions;

use crate::vocabularies::Words;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    /// All that is allowed is equally likely.
    Indifferent,
    /// Prefers the same tokens everywhere, by logits drawn once.
    Stubborn,
    /// Prefers what ends strings and brackets, escapes, blanks and halves of characters; never ends by itself.
    Hostile,
}

pub(crate) const MODELS: [Model; 3] = [Model::Indifferent, Model::Stubborn, Model::Hostile];

/// A linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % count
    }
}

impl Model {
    /// Of tokens that may be drawn the one with the highest logit is.
    fn logit(self, words: &Words, token: u32, seed: u64, random: &mut Random) -> u64 {
        // Fibonacci hashing: a logit that stays.
        let stays = (u64::from(token) ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44;
        match self {
            Model::Indifferent => random.below(1 << 20) as u64,
            Model::Stubborn => stays,
            Model::Hostile => {
                let bytes = words.tokenizer.token_bytes(token).unwrap_or_default();
                let odd = bytes.iter().filter(|byte| !byte.is_ascii_alphanumeric()).count();
                ((odd as u64) << 20) + stays
            }
        }
    }
}

pub(crate) fn tokens_of(mask: &[u32]) -> Vec<u32> {
    let bits = mask.iter().enumerate().flat_map(|(word, bits)| {
        (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word as u32 * 32 + bit)
    });
    bits.collect()
}

/// The tokens of an output.
pub(crate) enum Output {
    Whole(Vec<u32>),
    /// It did not come to its end.
    Begun(Vec<u32>),
}

pub(crate) fn generate(
    words: &Words,
    model: Model,
    mut matcher: Matcher,
    seed: u64,
    tokens_max: usize,
) -> Result<Output, MatchError> {
    let mut random = Random(seed);
    let mut output = Vec::new();
    let mut mask = Vec::new();
    while output.len() < tokens_max {
        if matcher.allowed(&mut mask)? == Next::End {
            return Ok(Output::Whole(output));
        }
        let (ends, others): (Vec<u32>, Vec<u32>) =
            tokens_of(&mask).into_iter().partition(|&token| words.tokenizer.is_end_of_generation(token));
        let willing = match model {
            Model::Hostile => false,
            _ => output.len() > tokens_max / 2 || random.below(4) == 0,
        };
        if !ends.is_empty() && (willing || others.is_empty()) {
            return Ok(Output::Whole(output));
        }
        let best = others.into_iter().max_by_key(|&token| model.logit(words, token, seed, &mut random));
        let token = best.expect("a mask without any token is an error");
        output.push(token);
        matcher.accept(token)?;
    }
    Ok(Output::Begun(output))
}

/// Whether the grammar takes all of `text`, as the tokenizer would write it, and may end there.
pub(crate) fn takes(words: &Words, mut matcher: Matcher, text: &str) -> bool {
    let mut mask = Vec::new();
    for token in words.tokenizer.encode(text, EncodeOptions::default()).unwrap() {
        if matcher.allowed(&mut mask).unwrap() == Next::End || !tokens_of(&mask).contains(&token) {
            return false;
        }
        matcher.accept(token).unwrap();
    }
    let next = matcher.allowed(&mut mask).unwrap();
    next == Next::End || tokens_of(&mask).iter().any(|&token| words.tokenizer.is_end_of_generation(token))
}
