// SPDX-License-Identifier: Apache-2.0

//! Random numbers for sampling: Philox4x32-10, a counter-based generator without state (Salmon et
//! al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//!
//! Each number is a function of (seed, choice, position, purpose). So a request draws the same
//! numbers after a resume, a preemption or a move to another worker.

/// Purpose of a number. One position may need several independent numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RandomPurpose {
    Token = 0,
    /// Decides whether XTC acts.
    Xtc = 1,
}

/// The request's part of the generator's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomStream {
    pub seed: u64,
    pub choice: u32,
}

impl RandomStream {
    /// Draws a number uniform in `[0, 1)`, a multiple of 2^-53.
    pub fn uniform(self, position: u64, purpose: RandomPurpose) -> f64 {
        let counter = [position as u32, (position >> 32) as u32, self.choice, purpose as u32];
        let words = philox(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
        (bits >> 11) as f64 / (1_u64 << 53) as f64
    }
}

const ROUNDS: usize = 10;

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let low = u64::from(counter[0]) * 0xD251_1F53;
        let high = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers come with the authors' Random123 library.
    #[test]
    fn philox_gives_the_published_answers() {
        let ones = u32::MAX;
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_part_of_the_key_changes_the_number() {
        let base = RandomStream { seed: 7, choice: 0 };
        let number = base.uniform(3, RandomPurpose::Token);
        assert_eq!(number, base.uniform(3, RandomPurpose::Token));
        for other in [
            RandomStream { seed: 8, ..base }.uniform(3, RandomPurpose::Token),
            RandomStream { seed: 7 | 1 << 40, ..base }.uniform(3, RandomPurpose::Token),
            RandomStream { choice: 1, ..base }.uniform(3, RandomPurpose::Token),
            base.uniform(4, RandomPurpose::Token),
            base.uniform(3, RandomPurpose::Xtc),
        ] {
            assert_ne!(number, other);
        }
    }

    /// Chi-squared test with 100 cells, thus 99 degrees of freedom: 148.2 is the 0.1% point.
    #[test]
    fn consecutive_positions_are_uniform() {
        let mut cells = [0_u32; 100];
        const DRAWS: u64 = 100_000;
        for position in 0..DRAWS {
            let number = RandomStream { seed: 42, choice: 0 }.uniform(position, RandomPurpose::Token);
            cells[(number * 100.0) as usize] += 1;
        }
        let expected = DRAWS as f64 / 100.0;
        let chi: f64 = cells.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        assert!(chi < 148.2, "chi-squared {chi}");
    }
}
