// SPDX-License-Identifier: Apache-2.0

//! Measures prefix sharing: bursts of requests with an equal prefix, with sharing and without, in
//! turns.
//!
//! Requests with different cache salts share no prefix, so both runs use the same fleet.

use proto::v1::inference_client::InferenceClient;
use serde::Serialize;
use tonic::transport::Channel;

use crate::report::median;
use crate::streams::{LoadPrompt, StreamLoad, StreamLoadError, StreamLoadReport, random_tokens, run_prompts};

/// Requests that start at once. Each prompt is a prefix that all share, followed by tokens of its
/// own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PrefixBurst {
    pub requests: u32,
    pub prefix_tokens: u32,
    pub own_tokens: u32,
    pub tokens: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct PrefixBurstReport {
    #[serde(flatten)]
    pub burst: PrefixBurst,
    /// Time from the first request to the last token, in each round.
    pub shared_s: Vec<f64>,
    pub apart_s: Vec<f64>,
    /// Time until the last request has its first token, in each round.
    pub shared_first_tokens_s: Vec<f64>,
    pub apart_first_tokens_s: Vec<f64>,
    /// Ratio of time without sharing to time with sharing, the median over the rounds.
    pub speed_up: f64,
    pub speed_up_of_first_tokens: f64,
    /// The upper bounds of these ratios, if every computed row took the same time.
    pub rows_ratio: f64,
    pub rows_ratio_of_first_tokens: f64,
}

impl PrefixBurst {
    fn load(self) -> StreamLoad {
        let prompt_tokens = self.prefix_tokens + self.own_tokens;
        StreamLoad { streams: self.requests, prompt_tokens, tokens: self.tokens, schema: None }
    }

    /// Ratio of rows computed without sharing to rows computed with it, for `tokens` of output. The
    /// last output token is not computed.
    fn rows_ratio(self, tokens: u32) -> f64 {
        let own = u64::from(self.own_tokens) + u64::from(tokens.saturating_sub(1));
        let (prefix, requests) = (u64::from(self.prefix_tokens), u64::from(self.requests));
        (requests * (prefix + own)) as f64 / (prefix + requests * own) as f64
    }

    /// Prompts of one run. Each `number` gives other prompts.
    fn prompts(self, vocabulary: u32, number: u32, shared: bool) -> Vec<LoadPrompt> {
        let first = number.wrapping_mul(self.requests + 1);
        let prefix = random_tokens(self.prefix_tokens, vocabulary, first);
        let prompt = |request: u32| {
            let own = random_tokens(self.own_tokens, vocabulary, first.wrapping_add(1 + request));
            let cache_salt = if shared { String::new() } else { format!("{number}-{request}") };
            LoadPrompt { ids: [&prefix[..], &own].concat(), cache_salt }
        };
        (0..self.requests).map(prompt).collect()
    }
}

/// Runs both once as warm-up and then `rounds` times in turns.
pub async fn compare_prefix_sharing(
    client: &InferenceClient<Channel>,
    burst: PrefixBurst,
    vocabulary: u32,
    rounds: u32,
) -> Result<PrefixBurstReport, StreamLoadError> {
    let (mut shared, mut apart) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        for (number, sharing, reports) in [(2 * round, true, &mut shared), (2 * round + 1, false, &mut apart)]
        {
            let prompts = burst.prompts(vocabulary, number, sharing);
            let report = run_prompts(client, burst.load(), prompts).await?;
            // The warm-up round faults in pages of weights and KV cache.
            if round > 0 {
                reports.push(report);
            }
        }
    }
    let of = |reports: &[StreamLoadReport], figure: fn(&StreamLoadReport) -> f64| {
        reports.iter().map(figure).collect::<Vec<_>>()
    };
    let total = |report: &StreamLoadReport| report.total_s;
    let first_tokens = |report: &StreamLoadReport| report.first_token.max_ms / 1e3;
    let (shared_s, apart_s) = (of(&shared, total), of(&apart, total));
    let (shared_first, apart_first) = (of(&shared, first_tokens), of(&apart, first_tokens));
    let ratio =
        |apart: &[f64], shared: &[f64]| median(apart.iter().zip(shared).map(|(a, s)| a / s).collect());
    Ok(PrefixBurstReport {
        burst,
        speed_up: ratio(&apart_s, &shared_s),
        speed_up_of_first_tokens: ratio(&apart_first, &shared_first),
        rows_ratio: burst.rows_ratio(burst.tokens),
        rows_ratio_of_first_tokens: burst.rows_ratio(1),
        shared_s,
        apart_s,
        shared_first_tokens_s: shared_first,
        apart_first_tokens_s: apart_first,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const BURST: PrefixBurst = PrefixBurst { requests: 16, prefix_tokens: 2048, own_tokens: 32, tokens: 16 };

    #[test]
    fn prompts_of_a_burst_share_only_their_prefix() {
        let shared = BURST.prompts(100_000, 3, true);
        let apart = BURST.prompts(100_000, 4, false);
        for prompts in [&shared, &apart] {
            let prefixes: HashSet<&[u32]> = prompts.iter().map(|prompt| &prompt.ids[..2048]).collect();
            let own: HashSet<&[u32]> = prompts.iter().map(|prompt| &prompt.ids[2048..]).collect();
            assert_eq!((prefixes.len(), own.len()), (1, 16));
        }
        let salts = |prompts: &[LoadPrompt]| {
            prompts.iter().map(|p| p.cache_salt.clone()).collect::<HashSet<_>>().len()
        };
        assert_eq!((salts(&shared), salts(&apart)), (1, 16));
        assert_ne!(
            shared[0].ids[..2048],
            apart[0].ids[..2048],
            "a run must not hit the prefix cache entries of another run"
        );
    }

    #[test]
    fn the_row_ratio_bounds_the_speed_up() {
        assert_eq!(BURST.rows_ratio(16), 16.0 * 2095.0 / (2048.0 + 16.0 * 47.0));
        assert_eq!(BURST.rows_ratio(1), 16.0 * 2080.0 / (2048.0 + 16.0 * 32.0));
        assert_eq!(PrefixBurst { requests: 1, ..BURST }.rows_ratio(16), 1.0);
    }
}
