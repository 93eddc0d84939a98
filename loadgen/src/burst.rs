//! What it saves that equal prefixes are computed and kept once: bursts of requests that share one, through one fleet, with
//! sharing and without in turns. Requests of different salts share nothing, so nothing of the fleet has to be switched.

use proto::v1::inference_client::InferenceClient;
use serde::Serialize;
use tonic::transport::Channel;

use crate::report::median;
use crate::streams::{Load, LoadError, LoadReport, Prompt, run_prompts, tokens};

/// Requests that come at once. Each has a prompt of the tokens that all share and some of its own, and an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Burst {
    pub requests: u32,
    pub prefix_tokens: u32,
    pub own_tokens: u32,
    pub tokens: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct BurstReport {
    #[serde(flatten)]
    pub burst: Burst,
    /// From the first request to the last token, in each round.
    pub shared_s: Vec<f64>,
    pub apart_s: Vec<f64>,
    /// Until the last of them has its first token.
    pub shared_first_tokens_s: Vec<f64>,
    pub apart_first_tokens_s: Vec<f64>,
    /// Apart to shared, the median over the rounds.
    pub speed_up: f64,
    pub speed_up_of_first_tokens: f64,
    /// What these are by rows, as if every row took as long and nothing else time.
    pub rows_ratio: f64,
    pub rows_ratio_of_first_tokens: f64,
}

impl Burst {
    fn load(self) -> Load {
        let prompt_tokens = self.prefix_tokens + self.own_tokens;
        Load { streams: self.requests, prompt_tokens, tokens: self.tokens, schema: None }
    }

    /// Rows that are computed without sharing by those with it, for `tokens` of output, of which the last is not computed.
    fn rows_ratio(self, tokens: u32) -> f64 {
        let own = u64::from(self.own_tokens) + u64::from(tokens.saturating_sub(1));
        let (prefix, requests) = (u64::from(self.prefix_tokens), u64::from(self.requests));
        (requests * (prefix + own)) as f64 / (prefix + requests * own) as f64
    }

    /// `number` makes the prompts of a run new ones.
    fn prompts(self, vocabulary: u32, number: u32, shared: bool) -> Vec<Prompt> {
        let first = number.wrapping_mul(self.requests + 1);
        let prefix = tokens(self.prefix_tokens, vocabulary, first);
        let prompt = |request: u32| {
            let own = tokens(self.own_tokens, vocabulary, first.wrapping_add(1 + request));
            let cache_salt = if shared { String::new() } else { format!("{number}-{request}") };
            Prompt { ids: [&prefix[..], &own].concat(), cache_salt }
        };
        (0..self.requests).map(prompt).collect()
    }
}

/// Once unmeasured and then `rounds` times in turns.
pub async fn shared_against_apart(
    client: &InferenceClient<Channel>,
    burst: Burst,
    vocabulary: u32,
    rounds: u32,
) -> Result<BurstReport, LoadError> {
    let (mut shared, mut apart) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        for (number, sharing, reports) in [(2 * round, true, &mut shared), (2 * round + 1, false, &mut apart)]
        {
            let prompts = burst.prompts(vocabulary, number, sharing);
            let report = run_prompts(client, burst.load(), prompts).await?;
            // The first steps fault in pages of weights and KV cache.
            if round > 0 {
                reports.push(report);
            }
        }
    }
    let of = |reports: &[LoadReport], figure: fn(&LoadReport) -> f64| {
        reports.iter().map(figure).collect::<Vec<_>>()
    };
    let total = |report: &LoadReport| report.total_s;
    let first_tokens = |report: &LoadReport| report.first_token.max_ms / 1e3;
    let (shared_s, apart_s) = (of(&shared, total), of(&apart, total));
    let (shared_first, apart_first) = (of(&shared, first_tokens), of(&apart, first_tokens));
    let ratio =
        |apart: &[f64], shared: &[f64]| median(apart.iter().zip(shared).map(|(a, s)| a / s).collect());
    Ok(BurstReport {
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

    const BURST: Burst = Burst { requests: 16, prefix_tokens: 2048, own_tokens: 32, tokens: 16 };

    #[test]
    fn prompts_of_a_burst_share_their_prefix_and_no_more() {
        let shared = BURST.prompts(100_000, 3, true);
        let apart = BURST.prompts(100_000, 4, false);
        for prompts in [&shared, &apart] {
            let prefixes: HashSet<&[u32]> = prompts.iter().map(|prompt| &prompt.ids[..2048]).collect();
            let own: HashSet<&[u32]> = prompts.iter().map(|prompt| &prompt.ids[2048..]).collect();
            assert_eq!((prefixes.len(), own.len()), (1, 16));
        }
        let salts =
            |prompts: &[Prompt]| prompts.iter().map(|p| p.cache_salt.clone()).collect::<HashSet<_>>().len();
        assert_eq!((salts(&shared), salts(&apart)), (1, 16));
        assert_ne!(shared[0].ids[..2048], apart[0].ids[..2048], "a run finds what another has left");
    }

    #[test]
    fn rows_bound_what_can_be_saved() {
        assert_eq!(BURST.rows_ratio(16), 16.0 * 2095.0 / (2048.0 + 16.0 * 47.0));
        assert_eq!(BURST.rows_ratio(1), 16.0 * 2080.0 / (2048.0 + 16.0 * 32.0));
        assert_eq!(Burst { requests: 1, ..BURST }.rows_ratio(16), 1.0);
    }
}
