// SPDX-License-Identifier: Apache-2.0

//! Capacity of workers: how many streams a worker takes, what the workers of a model take together,
//! and which requests exceed every worker.
//!
//! The router refuses a request that no worker can ever hold at once, with the numbers, instead of
//! letting it wait.

use super::request::{PriorityClass, Tenant};

/// Capacity of one worker, as it reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCapacity {
    pub running_max: u32,
    /// Requests that may wait at the worker: in all, of class batch, of one tenant.
    pub queue_max: u32,
    pub batch_queue_max: u32,
    pub tenant_queue_max: u32,
    /// 0: unknown.
    pub kv_blocks: u64,
    pub kv_block_tokens: u32,
}

/// A worker receives `running_max / AHEAD_DIVISOR` streams more than it runs. So it finds the next
/// request in its own queue before the router knows that a stream has ended.
const AHEAD_DIVISOR: u32 = 4;

impl WorkerCapacity {
    /// Streams that the router sends to the worker at once. They leave half of the worker's queue
    /// to its other clients.
    pub fn window(self) -> u32 {
        let ahead = (self.running_max / AHEAD_DIVISOR).clamp(1, (self.queue_max / 2).max(1));
        self.running_max.saturating_add(ahead)
    }

    /// Choices of one request that the worker accepts at once. Until its next step, all of them
    /// wait.
    fn choices_max(self, is_batch: bool, has_tenant_limit: bool) -> u32 {
        let class_queue_max = if is_batch { self.batch_queue_max } else { self.queue_max };
        if has_tenant_limit { class_queue_max.min(self.tenant_queue_max) } else { class_queue_max }
    }
}

/// Capacity of all workers of a model together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelCapacity {
    /// Sequences that the workers run at once.
    pub running_max: u32,
    /// Sequences that the worker with the most seats runs at once.
    pub worker_running_max: u32,
    /// Streams that the router sends to the workers at once.
    pub window: u32,
    /// Choices of one request that the workers accept: `[is_batch][has_tenant_limit]`.
    choices_max: [[u32; 2]; 2],
    /// KV cache of the worker that has the largest one.
    pub kv_blocks: u64,
    pub kv_block_tokens: u32,
}

/// Why no worker can ever run a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapacityExceeded {
    #[error(
        "{tokens} tokens of prompt and output need {needed} KV blocks of {block_tokens} tokens, the largest KV cache \
         of a worker has {blocks}; ask for fewer tokens or give the workers a larger KV cache"
    )]
    KvCache { tokens: u64, needed: u64, block_tokens: u32, blocks: u64 },
    #[error("the request asks for {streams} choices at once, this fleet accepts at most {max} per request")]
    Choices { streams: u32, max: u32 },
    #[error(
        "{width} beams run at once, a worker of this fleet runs at most {max} sequences (`running-max`); ask for \
         fewer beams"
    )]
    Beams { width: u32, max: u32 },
}

impl FromIterator<WorkerCapacity> for ModelCapacity {
    fn from_iter<I: IntoIterator<Item = WorkerCapacity>>(workers: I) -> Self {
        workers.into_iter().fold(ModelCapacity::default(), |model, worker| {
            let tokens = |blocks: u64, block_tokens: u32| blocks.saturating_mul(u64::from(block_tokens));
            let is_larger = tokens(worker.kv_blocks, worker.kv_block_tokens)
                > tokens(model.kv_blocks, model.kv_block_tokens);
            let (kv_blocks, kv_block_tokens) = match is_larger {
                true => (worker.kv_blocks, worker.kv_block_tokens),
                false => (model.kv_blocks, model.kv_block_tokens),
            };
            let mut choices_max = model.choices_max;
            for (is_batch, by_limit) in [false, true].into_iter().zip(&mut choices_max) {
                for (has_tenant_limit, sum) in [false, true].into_iter().zip(by_limit) {
                    *sum = sum.saturating_add(worker.choices_max(is_batch, has_tenant_limit));
                }
            }
            ModelCapacity {
                running_max: model.running_max.saturating_add(worker.running_max),
                worker_running_max: model.worker_running_max.max(worker.running_max),
                window: model.window.saturating_add(worker.window()),
                choices_max,
                kv_blocks,
                kv_block_tokens,
            }
        })
    }
}

impl ModelCapacity {
    /// Choices of one request that all workers of the model accept together.
    pub fn choices_max(self, class: PriorityClass, tenant: &Tenant) -> u32 {
        self.choices_max[usize::from(class == PriorityClass::Batch)][usize::from(*tenant != Tenant::Unnamed)]
    }

    /// Checks that a worker can run the request. `output_tokens` is `None` if the output may end
    /// with the KV cache.
    pub fn check(
        self,
        prompt_tokens: u64,
        output_tokens: Option<u32>,
        streams: u32,
        streams_max: u32,
    ) -> Result<(), CapacityExceeded> {
        if streams > streams_max {
            return Err(CapacityExceeded::Choices { streams, max: streams_max });
        }
        // A sequence generates at least one token. The KV cache never stores the last token.
        let stored = prompt_tokens + u64::from(output_tokens.unwrap_or(1)) - 1;
        let block_tokens = self.kv_block_tokens;
        let needed = stored.div_ceil(u64::from(block_tokens.max(1)));
        if block_tokens > 0 && needed > self.kv_blocks {
            let tokens = prompt_tokens + u64::from(output_tokens.unwrap_or(1));
            return Err(CapacityExceeded::KvCache { tokens, needed, block_tokens, blocks: self.kv_blocks });
        }
        Ok(())
    }
}

/// A beam search needs all its sequences at once, each for each token. One that did not fit would
/// compute evicted beams again for every token. Beams share the full blocks of the prompt. What
/// they share of their outputs is not known beforehand.
impl ModelCapacity {
    /// As [`Self::check`], for a beam search with this many beams.
    pub fn check_beams(
        self,
        prompt_tokens: u64,
        output_tokens: Option<u32>,
        width: u32,
    ) -> Result<(), CapacityExceeded> {
        if width > self.worker_running_max {
            return Err(CapacityExceeded::Beams { width, max: self.worker_running_max });
        }
        let output = u64::from(output_tokens.unwrap_or(1));
        let block_tokens = u64::from(self.kv_block_tokens.max(1));
        let own = (prompt_tokens % block_tokens + output - 1).div_ceil(block_tokens);
        let needed = prompt_tokens / block_tokens + own.saturating_mul(u64::from(width));
        if self.kv_block_tokens > 0 && needed > self.kv_blocks {
            let tokens = prompt_tokens + output.saturating_mul(u64::from(width));
            let (block_tokens, blocks) = (self.kv_block_tokens, self.kv_blocks);
            return Err(CapacityExceeded::KvCache { tokens, needed, block_tokens, blocks });
        }
        Ok(())
    }

    /// Output tokens of each beam with which a search fits, at least 1.
    pub fn beam_tokens_max(self, prompt_tokens: u64, width: u32) -> u32 {
        let Some(shared) = prompt_tokens.checked_div(u64::from(self.kv_block_tokens)) else {
            return u32::MAX;
        };
        let block_tokens = u64::from(self.kv_block_tokens);
        let own = self.kv_blocks.saturating_sub(shared) / u64::from(width.max(1));
        let output = (own.saturating_mul(block_tokens) + 1).saturating_sub(prompt_tokens % block_tokens);
        u32::try_from(output).unwrap_or(u32::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: ModelCapacity = ModelCapacity {
        running_max: 4,
        worker_running_max: 4,
        window: 5,
        choices_max: [[10; 2]; 2],
        kv_blocks: 4,
        kv_block_tokens: 16,
    };

    fn check(prompt_tokens: u64, output_tokens: Option<u32>) -> Result<(), CapacityExceeded> {
        CAPACITY.check(prompt_tokens, output_tokens, 1, 10)
    }

    #[test]
    fn a_request_may_fill_the_kv_cache_and_one_token_more_exceeds_it() {
        assert_eq!(check(60, Some(5)), Ok(()));
        let error = check(60, Some(6)).unwrap_err();
        assert_eq!(error, CapacityExceeded::KvCache { tokens: 66, needed: 5, block_tokens: 16, blocks: 4 });
        assert!(
            error.to_string().starts_with("66 tokens of prompt and output need 5 KV blocks of 16 tokens")
        );
        assert_eq!(check(64, None), Ok(()), "the output ends with the KV cache");
        assert!(check(65, None).is_err());
    }

    #[test]
    fn all_beams_of_a_search_fit_into_one_worker_at_once() {
        // Two blocks of the prompt, and one of each beam.
        assert_eq!(CAPACITY.check_beams(32, Some(17), 2), Ok(()));
        let error = CAPACITY.check_beams(32, Some(18), 2).unwrap_err();
        assert_eq!(error, CapacityExceeded::KvCache { tokens: 68, needed: 6, block_tokens: 16, blocks: 4 });
        assert_eq!(CAPACITY.check_beams(1, Some(1), 5), Err(CapacityExceeded::Beams { width: 5, max: 4 }));
        for (prompt, width) in [(1, 1), (1, 4), (16, 3), (17, 3), (31, 3), (32, 2), (33, 2), (63, 1)] {
            let most = CAPACITY.beam_tokens_max(prompt, width);
            let check = |output| CAPACITY.check_beams(prompt, Some(output), width);
            assert!(check(most).is_ok() && check(most + 1).is_err(), "{prompt} {width} {most}");
        }
        assert_eq!(CAPACITY.beam_tokens_max(200, 2), 1);
        assert_eq!(ModelCapacity { kv_block_tokens: 0, ..CAPACITY }.beam_tokens_max(8, 2), u32::MAX);
    }

    #[test]
    fn more_streams_than_the_maximum_exceed_the_capacity() {
        assert_eq!(CAPACITY.check(1, None, 10, 10), Ok(()));
        assert_eq!(CAPACITY.check(1, None, 11, 10), Err(CapacityExceeded::Choices { streams: 11, max: 10 }));
    }

    #[test]
    fn the_maximum_number_of_choices_is_the_smallest_limit_of_each_worker() {
        let worker = WorkerCapacity {
            queue_max: 8,
            batch_queue_max: 7,
            tenant_queue_max: 6,
            running_max: 64,
            ..WorkerCapacity::default()
        };
        let tenant_limit_above_queue = WorkerCapacity { tenant_queue_max: 9, ..worker };
        let model: ModelCapacity = [worker, tenant_limit_above_queue].into_iter().collect();
        let named = Tenant::Named("a".into());
        let choices_max =
            |class| [model.choices_max(class, &Tenant::Unnamed), model.choices_max(class, &named)];
        assert_eq!(choices_max(PriorityClass::Default), [16, 14]);
        assert_eq!(choices_max(PriorityClass::Interactive), [16, 14]);
        assert_eq!(choices_max(PriorityClass::Batch), [14, 13]);
    }

    #[test]
    fn a_worker_receives_a_quarter_more_streams_than_it_runs() {
        let window = |running_max, queue_max| {
            WorkerCapacity { running_max, queue_max, ..WorkerCapacity::default() }.window()
        };
        assert_eq!([window(64, 256), window(2, 256), window(1, 1), window(64, 8)], [80, 3, 2, 68]);
    }

    #[test]
    fn running_sequences_add_up_and_the_kv_cache_is_the_largest_workers() {
        let small = WorkerCapacity {
            running_max: 4,
            queue_max: 4,
            kv_blocks: 10,
            kv_block_tokens: 16,
            ..WorkerCapacity::default()
        };
        let large = WorkerCapacity { kv_blocks: 3, kv_block_tokens: 64, ..small };
        let model: ModelCapacity = [small, large, small].into_iter().collect();
        assert_eq!((model.running_max, model.window), (12, 15));
        assert_eq!((model.kv_blocks, model.kv_block_tokens), (3, 64));
        assert_eq!(ModelCapacity::from_iter([]), ModelCapacity::default());
    }

    #[test]
    fn an_unknown_kv_cache_refuses_no_request() {
        let unknown = ModelCapacity { kv_block_tokens: 0, ..CAPACITY };
        assert_eq!(unknown.check(1 << 40, Some(u32::MAX), 1, 1), Ok(()));
    }
}
