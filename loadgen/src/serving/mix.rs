// SPDX-License-Identifier: Apache-2.0

//! What requests ask for: prompts, output lengths and conversations.
//!
//! A conversation has one turn or several. Conversation N of a mix depends on the seed and N only,
//! so that two runs with one seed send the same prompts.

use std::time::Duration;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Exp, LogNormal};

use super::prose::{TokenScale, write_words};
use super::sharegpt::{SHAREGPT_TOKENS_MAX, ShareGptPair};

/// The built-in ShareGPT-like lengths are log-normal. The means are those of ShareGPT in the paper
/// on PagedAttention (Kwon et al. 2023, section 6.1, figure 11): 161.31 and 337.99 tokens. The
/// paper has no deviations. These are assumed: prompts spread more than answers.
const SHAREGPT_INPUT_MEAN: f64 = 161.31;
const SHAREGPT_INPUT_SIGMA: f64 = 1.3;
const SHAREGPT_OUTPUT_MEAN: f64 = 337.99;
const SHAREGPT_OUTPUT_SIGMA: f64 = 1.0;
/// Bounds of vLLM's benchmark for pairs of ShareGPT.
const SHAREGPT_TOKENS_MIN: f64 = 4.0;
const SHAREGPT_INPUT_TOKENS_MAX: f64 = 1024.0;

/// Separates the random numbers of shared prefixes from those of conversations.
const PREFIX_STREAM: u64 = u64::MAX;

/// One prompt of a conversation and the length of its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ConversationTurn {
    pub prompt: String,
    pub output_tokens: u32,
    /// Between the end of the answer before and this turn.
    pub think_time: Duration,
}

/// Lengths around a mean, uniform within `mean * (1 ± range_ratio)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomLengths {
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// From 0 up to, and not including, 1.
    pub range_ratio: f64,
    /// Tokens before the own ones that all prompts have in common.
    pub prefix_tokens: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum MixKind {
    Random(RandomLengths),
    /// Log-normal lengths. `output_tokens` replaces the answers' lengths.
    ShareGptLike {
        output_tokens: Option<u32>,
    },
    /// Pairs of a file in the form of ShareGPT.
    ShareGptFile {
        pairs: Vec<ShareGptPair>,
        output_tokens: Option<u32>,
    },
    /// Each turn sends the whole conversation before it. Think times are exponential.
    MultiTurn {
        lengths: RandomLengths,
        turns: u32,
        mean_think_time: Duration,
    },
}

/// A mix of conversations for one server.
#[derive(Clone, Debug, PartialEq)]
pub struct ServingMix {
    pub kind: MixKind,
    pub seed: u64,
    pub scale: TokenScale,
    /// Prompt and answer of a conversation stay within the context of the model.
    pub context_tokens: Option<u32>,
}

impl ServingMix {
    /// The turns of a conversation. At least one.
    pub fn conversation(&self, index: u64) -> Vec<ConversationTurn> {
        let mut random = self.random(index);
        match &self.kind {
            MixKind::Random(lengths) => vec![self.random_turn(lengths, true, &mut random)],
            MixKind::ShareGptLike { output_tokens } => vec![self.sharegpt_like(*output_tokens, &mut random)],
            MixKind::ShareGptFile { pairs, output_tokens } => {
                vec![sharegpt_turn(pairs, *output_tokens, index)]
            }
            MixKind::MultiTurn { lengths, turns, mean_think_time } => {
                self.multi_turn(lengths, *turns, *mean_think_time, &mut random)
            }
        }
    }

    fn random(&self, stream: u64) -> Xoshiro256PlusPlus {
        // An odd factor keeps the streams of neighbouring seeds apart.
        Xoshiro256PlusPlus::seed_from_u64(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(stream))
    }

    fn random_turn(
        &self,
        lengths: &RandomLengths,
        is_first: bool,
        random: &mut Xoshiro256PlusPlus,
    ) -> ConversationTurn {
        let mut around = |mean: u32| {
            let spread = f64::from(mean) * lengths.range_ratio;
            let low = (f64::from(mean) - spread).ceil().max(1.0) as u32;
            random.random_range(low..=((f64::from(mean) + spread).floor() as u32).max(low))
        };
        let (input_tokens, output_tokens) = (around(lengths.input_tokens), around(lengths.output_tokens));
        let mut prompt = String::new();
        if is_first && lengths.prefix_tokens > 0 {
            let bytes = self.scale.prompt_bytes(lengths.prefix_tokens);
            prompt = write_words(&mut self.random(PREFIX_STREAM), bytes) + "\n";
        }
        prompt += &write_words(random, self.scale.prompt_bytes(input_tokens));
        ConversationTurn { prompt, output_tokens, think_time: Duration::ZERO }
    }

    fn sharegpt_like(&self, output: Option<u32>, random: &mut Xoshiro256PlusPlus) -> ConversationTurn {
        let tokens_max = f64::from(self.context_tokens.unwrap_or(u32::MAX).min(SHAREGPT_TOKENS_MAX));
        let mut length = |mean: f64, sigma: f64, max: f64| {
            let drawn = LogNormal::new(mean.ln() - sigma * sigma / 2.0, sigma)
                .map_or(mean, |lengths| lengths.sample(random));
            drawn.clamp(SHAREGPT_TOKENS_MIN, max.max(SHAREGPT_TOKENS_MIN)) as u32
        };
        let input_max = SHAREGPT_INPUT_TOKENS_MAX.min(tokens_max / 2.0);
        let input_tokens = length(SHAREGPT_INPUT_MEAN, SHAREGPT_INPUT_SIGMA, input_max);
        let output_max = tokens_max - f64::from(input_tokens);
        let drawn = length(SHAREGPT_OUTPUT_MEAN, SHAREGPT_OUTPUT_SIGMA, output_max);
        let prompt = write_words(random, self.scale.prompt_bytes(input_tokens));
        ConversationTurn { prompt, output_tokens: output.unwrap_or(drawn), think_time: Duration::ZERO }
    }

    fn multi_turn(
        &self,
        lengths: &RandomLengths,
        turns: u32,
        mean_think_time: Duration,
        random: &mut Xoshiro256PlusPlus,
    ) -> Vec<ConversationTurn> {
        let mut made: Vec<ConversationTurn> = Vec::new();
        // Each turn has the prompts and answers of all turns before in its prompt.
        let mut tokens_left = u64::from(self.context_tokens.unwrap_or(u32::MAX));
        for index in 0..turns.max(1) {
            let mut turn = self.random_turn(lengths, index == 0, random);
            if index > 0 && !mean_think_time.is_zero() {
                let mean_s = mean_think_time.as_secs_f64();
                let drawn_s = Exp::new(1.0 / mean_s).map_or(mean_s, |times| times.sample(random));
                turn.think_time = Duration::try_from_secs_f64(drawn_s).unwrap_or(mean_think_time);
            }
            let input_tokens = u64::from(self.scale.text_tokens(&turn.prompt));
            let Some(left) = tokens_left.checked_sub(input_tokens + u64::from(turn.output_tokens)) else {
                made.extend(made.is_empty().then_some(turn));
                break;
            };
            tokens_left = left;
            made.push(turn);
        }
        made
    }
}

/// After the last pair, the first one comes again.
fn sharegpt_turn(pairs: &[ShareGptPair], output_tokens: Option<u32>, index: u64) -> ConversationTurn {
    let at = index.checked_rem(pairs.len() as u64).and_then(|at| pairs.get(at as usize));
    let (prompt, own_tokens) =
        at.map_or((String::new(), 1), |pair| (pair.prompt.clone(), pair.output_tokens));
    ConversationTurn {
        prompt,
        output_tokens: output_tokens.unwrap_or(own_tokens),
        think_time: Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: RandomLengths =
        RandomLengths { input_tokens: 100, output_tokens: 20, range_ratio: 0.5, prefix_tokens: 0 };

    fn mix(kind: MixKind, seed: u64) -> ServingMix {
        ServingMix { kind, seed, scale: TokenScale::TYPICAL, context_tokens: None }
    }

    fn tokens(text: &str) -> f64 {
        f64::from(TokenScale::TYPICAL.text_tokens(text))
    }

    #[test]
    fn random_lengths_fill_their_range() {
        let mix = mix(MixKind::Random(LENGTHS), 1);
        let turns: Vec<_> = (0..2000).flat_map(|index| mix.conversation(index)).collect();
        let outputs: Vec<u32> = turns.iter().map(|turn| turn.output_tokens).collect();
        assert_eq!((outputs.iter().min(), outputs.iter().max()), (Some(&10), Some(&30)));
        let mean = turns.iter().map(|turn| tokens(&turn.prompt)).sum::<f64>() / 2000.0;
        assert!((mean - 100.0).abs() < 3.0, "{mean}");
    }

    #[test]
    fn a_range_ratio_of_0_gives_equal_lengths_and_other_words() {
        let mix = mix(MixKind::Random(RandomLengths { range_ratio: 0.0, ..LENGTHS }), 1);
        let (first, second) = (mix.conversation(0), mix.conversation(1));
        assert_eq!((first[0].output_tokens, second[0].output_tokens), (20, 20));
        assert_ne!(first[0].prompt, second[0].prompt);
    }

    #[test]
    fn prompts_share_their_prefix_and_nothing_more() {
        let mix = mix(MixKind::Random(RandomLengths { prefix_tokens: 50, ..LENGTHS }), 1);
        let prompts: Vec<String> = (0..9).map(|index| mix.conversation(index).remove(0).prompt).collect();
        let parts: Vec<(&str, &str)> = prompts.iter().filter_map(|prompt| prompt.split_once('\n')).collect();
        assert!(parts.len() == 9 && parts.iter().all(|part| part.0 == parts[0].0));
        assert!(parts[1..].iter().all(|part| part.1 != parts[0].1));
        assert!((tokens(parts[0].0) - 50.0).abs() < 3.0);
    }

    #[test]
    fn sharegpt_like_lengths_have_the_means_of_the_paper() {
        let mix = mix(MixKind::ShareGptLike { output_tokens: None }, 1);
        let turns: Vec<_> = (0..4000).flat_map(|index| mix.conversation(index)).collect();
        let input = turns.iter().map(|turn| tokens(&turn.prompt)).sum::<f64>() / 4000.0;
        let output = turns.iter().map(|turn| f64::from(turn.output_tokens)).sum::<f64>() / 4000.0;
        // The bounds of the benchmark cut the long tails.
        assert!((130.0..170.0).contains(&input), "{input}");
        assert!((300.0..345.0).contains(&output), "{output}");
    }

    #[test]
    fn sharegpt_like_requests_fit_into_a_small_context() {
        let kind = MixKind::ShareGptLike { output_tokens: None };
        let mix = ServingMix { context_tokens: Some(256), ..mix(kind, 1) };
        for turn in (0..500).flat_map(|index| mix.conversation(index)) {
            assert!(tokens(&turn.prompt) + f64::from(turn.output_tokens) <= 259.0, "{turn:?}");
        }
    }

    #[test]
    fn a_conversation_ends_before_the_context_does_and_thinks_between_turns() {
        let kind =
            |turns| MixKind::MultiTurn { lengths: LENGTHS, turns, mean_think_time: Duration::from_secs(2) };
        let turns = mix(kind(500), 1).conversation(0);
        assert_eq!((turns.len(), turns[0].think_time), (500, Duration::ZERO));
        let mean = turns[1..].iter().map(|turn| turn.think_time.as_secs_f64()).sum::<f64>() / 499.0;
        assert!((mean - 2.0).abs() < 0.4, "{mean}");
        let short = ServingMix { context_tokens: Some(500), ..mix(kind(9), 1) }.conversation(0);
        assert!((2..9).contains(&short.len()), "{}", short.len());
        let tiny = ServingMix { context_tokens: Some(1), ..mix(kind(9), 1) }.conversation(0);
        assert_eq!(tiny.len(), 1, "the server says that the prompt is too long");
    }

    #[test]
    fn pairs_of_a_file_come_in_turn_and_again() {
        let pair = |name: &str| ShareGptPair { prompt: name.to_owned(), output_tokens: 9 };
        let pairs = vec![pair("a"), pair("b")];
        let kind = |output_tokens| MixKind::ShareGptFile { pairs: pairs.clone(), output_tokens };
        let turns: Vec<_> = (0..3).flat_map(|index| mix(kind(None), 1).conversation(index)).collect();
        assert_eq!(turns.iter().map(|turn| turn.prompt.as_str()).collect::<Vec<_>>(), ["a", "b", "a"]);
        assert_eq!(turns[0].output_tokens, 9);
        assert_eq!(mix(kind(Some(4)), 1).conversation(0)[0].output_tokens, 4);
    }

    #[test]
    fn a_conversation_depends_on_seed_and_index_only() {
        let kind = MixKind::Random(LENGTHS);
        let (one, other) = (mix(kind.clone(), 1), mix(kind, 2));
        let backwards: Vec<_> = (0..20).rev().map(|index| one.conversation(index)).collect();
        let forwards: Vec<_> = (0..20).map(|index| one.conversation(index)).collect();
        assert!(backwards.iter().rev().eq(&forwards));
        assert_ne!(one.conversation(0), other.conversation(0));
    }
}
