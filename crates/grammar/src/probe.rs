// SPDX-License-Identifier: Apache-2.0

//! Follows some outputs through a new grammar, so that a grammar that exceeds a limit soon after
//! its start is refused when it is checked, with the limit, and not in the middle of an output.

use crate::grammar_source::CompileError;
use crate::matcher::{CompiledGrammar, MatchError, MatcherStatus, compiler_error};

/// Outputs, and tokens of each. Limits that depend on the size of a grammar are met where it
/// branches, which is within the first tokens. A token takes about 50 us.
const WALKS: u64 = 4;
const TOKENS: usize = 24;

pub(crate) fn walk(grammar: &CompiledGrammar) -> Result<(), CompileError> {
    (0..WALKS).try_for_each(|walk| walk_once(grammar, walk))
}

fn walk_once(grammar: &CompiledGrammar, walk: u64) -> Result<(), CompileError> {
    let (mut matcher, mut mask, mut random) = (grammar.matcher(), Vec::new(), walk);
    for token in 0..TOKENS {
        let refused = match matcher.compute_mask(&mut mask) {
            Ok(MatcherStatus::Finished) => return Ok(()),
            Ok(MatcherStatus::Active) => matcher.accept(pick(&mask, &mut random)).err(),
            Err(error) => Some(error),
        };
        match refused {
            None => {}
            Some(MatchError::TooComplex) => {
                let (limit, of_lexer) = matcher.limit_met().unwrap_or_default();
                if of_lexer && token > 0 {
                    // Texts of a model may stay within the limit, although this random one did not.
                    return Ok(());
                }
                return Err(compiler_error(&format_args!("{}: {limit}", MatchError::TooComplex)));
            }
            // The first walk finds a grammar that allows no first token.
            Some(_) if token == 0 => return Err(CompileError::NothingMatches),
            // An end token that the walk picked, or a dead end of the grammar's own.
            Some(_) => return Ok(()),
        }
    }
    Ok(())
}

/// One of the allowed tokens. A walk is the same every time.
fn pick(mask: &[u32], random: &mut u64) -> u32 {
    // Knuth's linear congruential generator (MMIX).
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let allowed: u64 = mask.iter().map(|word| u64::from(word.count_ones())).sum();
    let mut skip = (*random >> 33) % allowed.max(1);
    for (index, &word) in mask.iter().enumerate() {
        let ones = u64::from(word.count_ones());
        if skip < ones {
            let bit = (0..32).filter(|bit| word >> bit & 1 == 1).nth(skip as usize).unwrap_or(0);
            return index as u32 * 32 + bit;
        }
        skip -= ones;
    }
    0
}
