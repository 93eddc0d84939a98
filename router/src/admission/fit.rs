//! What the workers of a model have room for, and what no worker could ever hold: that is refused at once, with the
//! numbers, instead of waiting for nothing.

use super::{Class, Tenant};

/// What one worker has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seats {
    pub(crate) running_max: u32,
    /// Requests that may wait; of lower priority; of one tenant.
    pub(crate) queue_max: u32,
    pub(crate) batch_queue_max: u32,
    pub(crate) tenant_queue_max: u32,
    /// 0: not known.
    pub(crate) kv_blocks: u64,
    pub(crate) kv_block_tokens: u32,
}

/// Of what a worker runs at once, the part that it is given beyond that: for its next step, it finds the next one in its own
/// queue while this process does not know yet that a stream has ended.
const AHEAD: u32 = 4;

impl Seats {
    /// Streams that it is given. They leave half of its queue to those who come to it by other ways.
    pub(crate) fn window(self) -> u32 {
        let ahead = (self.running_max / AHEAD).clamp(1, (self.queue_max / 2).max(1));
        self.running_max.saturating_add(ahead)
    }

    /// Choices of one request that it takes at once: until its next step all of them wait.
    fn at_once(self, is_batch: bool, has_bound: bool) -> u32 {
        let of_class = if is_batch { self.batch_queue_max } else { self.queue_max };
        if has_bound { of_class.min(self.tenant_queue_max) } else { of_class }
    }
}

/// What the workers of a model have together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Streams that they run at once.
    pub(crate) seats: u32,
    /// And with those that are to come next.
    pub(crate) window: u32,
    /// Choices of one request that they take: by whether it is of lower priority, and whether its tenant has a bound.
    at_once: [[u32; 2]; 2],
    /// Of the one that has most.
    pub(crate) kv_blocks: u64,
    pub(crate) kv_block_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NeverFits {
    #[error(
        "{tokens} tokens of prompt and output need {needed} KV blocks of {block_tokens} tokens, the largest budget of a \
         worker is {blocks}; ask for fewer tokens or give the workers a larger KV budget"
    )]
    KvBudget { tokens: u64, needed: u64, block_tokens: u32, blocks: u64 },
    #[error("{streams} continuations were asked for at once, this fleet takes at most {max} of one request")]
    Streams { streams: u32, max: u32 },
}

impl FromIterator<Seats> for Room {
    fn from_iter<I: IntoIterator<Item = Seats>>(workers: I) -> Self {
        workers.into_iter().fold(Room::default(), |room, seats| {
            let tokens = |blocks: u64, block_tokens: u32| blocks.saturating_mul(u64::from(block_tokens));
            let more =
                tokens(seats.kv_blocks, seats.kv_block_tokens) > tokens(room.kv_blocks, room.kv_block_tokens);
            let (kv_blocks, kv_block_tokens) = match more {
                true => (seats.kv_blocks, seats.kv_block_tokens),
                false => (room.kv_blocks, room.kv_block_tokens),
            };
            let mut at_once = room.at_once;
            for (is_batch, by_bound) in [false, true].into_iter().zip(&mut at_once) {
                for (has_bound, sum) in [false, true].into_iter().zip(by_bound) {
                    *sum = sum.saturating_add(seats.at_once(is_batch, has_bound));
                }
            }
            Room {
                seats: room.seats.saturating_add(seats.running_max),
                window: room.window.saturating_add(seats.window()),
                at_once,
                kv_blocks,
                kv_block_tokens,
            }
        })
    }
}

impl Room {
    /// Choices of one request that all workers take.
    pub(crate) fn at_once(self, class: Class, tenant: &Tenant) -> u32 {
        self.at_once[usize::from(class == Class::Batch)][usize::from(*tenant != Tenant::Unnamed)]
    }

    /// `output_tokens`: those asked for; none where the output may end with the budget.
    pub(crate) fn check(
        self,
        prompt_tokens: u64,
        output_tokens: Option<u32>,
        streams: u32,
        streams_max: u32,
    ) -> Result<(), NeverFits> {
        if streams > streams_max {
            return Err(NeverFits::Streams { streams, max: streams_max });
        }
        // At least one token is put out. The last one's keys and values are never stored.
        let stored = prompt_tokens + u64::from(output_tokens.unwrap_or(1)) - 1;
        let block_tokens = self.kv_block_tokens;
        let needed = stored.div_ceil(u64::from(block_tokens.max(1)));
        if block_tokens > 0 && needed > self.kv_blocks {
            let tokens = prompt_tokens + u64::from(output_tokens.unwrap_or(1));
            return Err(NeverFits::KvBudget { tokens, needed, block_tokens, blocks: self.kv_blocks });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room { seats: 4, window: 5, at_once: [[10; 2]; 2], kv_blocks: 4, kv_block_tokens: 16 };

    fn check(prompt_tokens: u64, output_tokens: Option<u32>) -> Result<(), NeverFits> {
        ROOM.check(prompt_tokens, output_tokens, 1, 10)
    }

    #[test]
    fn what_fills_the_budget_fits_and_one_token_more_never_does() {
        assert_eq!(check(60, Some(5)), Ok(()));
        let error = check(60, Some(6)).unwrap_err();
        assert_eq!(error, NeverFits::KvBudget { tokens: 66, needed: 5, block_tokens: 16, blocks: 4 });
        assert!(
            error.to_string().starts_with("66 tokens of prompt and output need 5 KV blocks of 16 tokens")
        );
        assert_eq!(check(64, None), Ok(()), "the output ends with the budget");
        assert!(check(65, None).is_err());
    }

    #[test]
    fn more_streams_than_are_taken_never_fit() {
        assert_eq!(ROOM.check(1, None, 10, 10), Ok(()));
        assert_eq!(ROOM.check(1, None, 11, 10), Err(NeverFits::Streams { streams: 11, max: 10 }));
    }

    #[test]
    fn what_is_taken_at_once_is_the_least_of_the_workers_bounds() {
        let worker = Seats {
            queue_max: 8,
            batch_queue_max: 7,
            tenant_queue_max: 6,
            running_max: 64,
            ..Seats::default()
        };
        let crooked = Seats { tenant_queue_max: 9, ..worker };
        let room: Room = [worker, crooked].into_iter().collect();
        let named = Tenant::Named("a".into());
        let taken = |class| [room.at_once(class, &Tenant::Unnamed), room.at_once(class, &named)];
        assert_eq!(taken(Class::Default), [16, 14]);
        assert_eq!(taken(Class::Interactive), [16, 14]);
        assert_eq!(taken(Class::Batch), [14, 13]);
    }

    #[test]
    fn a_worker_is_given_a_quarter_more_than_it_runs() {
        let window = |running_max, queue_max| Seats { running_max, queue_max, ..Seats::default() }.window();
        assert_eq!([window(64, 256), window(2, 256), window(1, 1), window(64, 8)], [80, 3, 2, 68]);
    }

    #[test]
    fn workers_add_up_but_a_request_needs_one_that_holds_it_all() {
        let small =
            Seats { running_max: 4, queue_max: 4, kv_blocks: 10, kv_block_tokens: 16, ..Seats::default() };
        let large = Seats { kv_blocks: 3, kv_block_tokens: 64, ..small };
        let room: Room = [small, large, small].into_iter().collect();
        assert_eq!((room.seats, room.window), (12, 15));
        assert_eq!((room.kv_blocks, room.kv_block_tokens), (3, 64));
        assert_eq!(Room::from_iter([]), Room::default());
    }

    #[test]
    fn an_unknown_budget_refuses_nobody() {
        assert_eq!(Room { kv_block_tokens: 0, ..ROOM }.check(1 << 40, Some(u32::MAX), 1, 1), Ok(()));
    }
}
