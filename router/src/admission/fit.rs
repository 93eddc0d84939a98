//! What the workers of a model have room for, and what no worker could ever hold: that is refused at once, with the
//! numbers, instead of waiting for nothing.

/// What one worker has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seats {
    pub(crate) running_max: u32,
    pub(crate) queue_max: u32,
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
}

/// What the workers of a model have together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Streams that they are given.
    pub(crate) window: u32,
    /// Requests that all of them run or let wait.
    pub(crate) streams: u32,
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
    #[error("{streams} continuations were asked for at once, the workers of this model take {max}")]
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
            Room {
                window: room.window.saturating_add(seats.window()),
                streams: room.streams.saturating_add(seats.running_max).saturating_add(seats.queue_max),
                kv_blocks,
                kv_block_tokens,
            }
        })
    }
}

impl Room {
    /// `output_tokens`: those asked for; none where the output may end with the budget.
    pub(crate) fn check(
        self,
        prompt_tokens: u64,
        output_tokens: Option<u32>,
        streams: u32,
    ) -> Result<(), NeverFits> {
        if streams > self.streams {
            return Err(NeverFits::Streams { streams, max: self.streams });
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

    const ROOM: Room = Room { window: 5, streams: 10, kv_blocks: 4, kv_block_tokens: 16 };

    #[test]
    fn what_fills_the_budget_fits_and_one_token_more_never_does() {
        assert_eq!(ROOM.check(60, Some(5), 1), Ok(()));
        let error = ROOM.check(60, Some(6), 1).unwrap_err();
        assert_eq!(error, NeverFits::KvBudget { tokens: 66, needed: 5, block_tokens: 16, blocks: 4 });
        assert!(
            error.to_string().starts_with("66 tokens of prompt and output need 5 KV blocks of 16 tokens")
        );
        assert_eq!(ROOM.check(64, None, 1), Ok(()), "the output ends with the budget");
        assert!(ROOM.check(65, None, 1).is_err());
    }

    #[test]
    fn more_streams_than_all_workers_take_never_fit() {
        assert_eq!(ROOM.check(1, None, 10), Ok(()));
        assert_eq!(ROOM.check(1, None, 11), Err(NeverFits::Streams { streams: 11, max: 10 }));
    }

    #[test]
    fn a_worker_is_given_a_quarter_more_than_it_runs() {
        let window = |running_max, queue_max| Seats { running_max, queue_max, ..Seats::default() }.window();
        assert_eq!([window(64, 256), window(2, 256), window(1, 1), window(64, 8)], [80, 3, 2, 68]);
    }

    #[test]
    fn workers_add_up_but_a_request_needs_one_that_holds_it_all() {
        let small = Seats { running_max: 4, queue_max: 4, kv_blocks: 10, kv_block_tokens: 16 };
        let large = Seats { kv_blocks: 3, kv_block_tokens: 64, ..small };
        let room: Room = [small, large, small].into_iter().collect();
        assert_eq!(room, Room { window: 15, streams: 24, kv_blocks: 3, kv_block_tokens: 64 });
        assert_eq!(Room::from_iter([]), Room::default());
    }

    #[test]
    fn an_unknown_budget_refuses_nobody() {
        assert_eq!(Room { kv_block_tokens: 0, ..ROOM }.check(1 << 40, Some(u32::MAX), 1), Ok(()));
    }
}
