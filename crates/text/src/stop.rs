// SPDX-License-Identifier: Apache-2.0

//! Stop strings that may span several tokens. Text is held back only while it may still become a
//! stop string.
//!
//! The first stop string that is complete wins; of several that end at the same byte, the longest
//! wins. This depends on the text alone and not on how it was split into tokens, so a resumed
//! stream and a stream with draft tokens end at the same place.

/// Most stop strings of a request. Each costs one comparison per byte of output.
pub const MAX_STOP_STRINGS: usize = 64;
/// Most bytes of a stop string, which is also the most text that is held back.
pub const MAX_STOP_STRING_BYTES: usize = 4096;

/// Why a request's stop strings are invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StopStringError {
    #[error("{count} stop strings; the limit is {MAX_STOP_STRINGS}")]
    TooMany { count: usize },
    #[error("stop string {index} is empty")]
    Empty { index: usize },
    #[error("stop string {index} has {bytes} bytes; the limit is {MAX_STOP_STRING_BYTES}")]
    TooLong { index: usize, bytes: usize },
}

/// A stop string with its Knuth-Morris-Pratt automaton, which takes linear time for any output.
#[derive(Debug)]
struct StopString {
    text: Box<[u8]>,
    /// At index `n`: length of the longest proper prefix of the text that is a suffix of its first
    /// `n + 1` bytes.
    border: Box<[u16]>,
    /// How many bytes of this stop string the output currently ends with.
    matched: usize,
}

impl StopString {
    fn new(text: String) -> Self {
        let text = text.into_bytes().into_boxed_slice();
        let mut border = vec![0u16; text.len()].into_boxed_slice();
        for end in 1..text.len() {
            let mut length = usize::from(border[end - 1]);
            while length > 0 && text[length] != text[end] {
                length = usize::from(border[length - 1]);
            }
            border[end] = (length + usize::from(text[length] == text[end])) as u16;
        }
        Self { text, border, matched: 0 }
    }

    /// Adds one byte of output. Returns true if the output now ends with the whole stop string.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.text[self.matched] != byte {
            self.matched = usize::from(self.border[self.matched - 1]);
        }
        self.matched += usize::from(self.text[self.matched] == byte);
        self.matched == self.text.len()
    }
}

/// The result of [`StopMatcher::push`].
#[derive(Debug, PartialEq, Eq)]
pub struct StopProgress {
    /// Text that no longer can become part of a stop string.
    pub emit: String,
    /// Index of the stop string that ended the output. Nothing follows it.
    pub matched: Option<usize>,
}

/// Searches streamed text for stop strings.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<StopString>,
    /// Text held back. Between two calls of `push` it is shorter than the longest stop string.
    held: String,
    ended: bool,
}

impl StopMatcher {
    pub fn new(stops: Vec<String>) -> Result<Self, StopStringError> {
        if stops.len() > MAX_STOP_STRINGS {
            return Err(StopStringError::TooMany { count: stops.len() });
        }
        for (index, stop) in stops.iter().enumerate() {
            match stop.len() {
                0 => return Err(StopStringError::Empty { index }),
                bytes if bytes > MAX_STOP_STRING_BYTES => {
                    return Err(StopStringError::TooLong { index, bytes });
                }
                _ => {}
            }
        }
        Ok(Self {
            stops: stops.into_iter().map(StopString::new).collect(),
            held: String::new(),
            ended: false,
        })
    }

    /// Adds the next text. After a match it discards all further text.
    pub fn push(&mut self, text: &str) -> StopProgress {
        if self.ended {
            return StopProgress { emit: String::new(), matched: None };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (offset, &byte) in text.as_bytes().iter().enumerate() {
            let complete = (self.stops.iter_mut().enumerate())
                .filter_map(|(index, stop)| stop.advance(byte).then_some((stop.text.len(), index)))
                .max_by_key(|&(bytes, index)| (bytes, std::cmp::Reverse(index)));
            if let Some((bytes, index)) = complete {
                self.held.truncate(before + offset + 1 - bytes);
                self.ended = true;
                return StopProgress { emit: std::mem::take(&mut self.held), matched: Some(index) };
            }
        }
        // A stop string begins with a whole character, so the split is at a character boundary.
        let hold = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - hold);
        StopProgress { emit: std::mem::replace(&mut self.held, kept), matched: None }
    }

    /// Returns the text that is still held back; the output has ended.
    pub fn finish(self) -> String {
        self.held
    }
}

const _: () = assert!(MAX_STOP_STRING_BYTES <= u16::MAX as usize, "borders are stored in 16 bits");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>, String) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect()).unwrap();
        let mut matched = None;
        let emitted = pieces
            .iter()
            .map(|piece| {
                let progress = matcher.push(piece);
                matched = matched.or(progress.matched);
                progress.emit
            })
            .collect();
        (emitted, matched, matcher.finish())
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let (emitted, matched, rest) = run(&["###", "\nUser:"], &["a#", "b\nUs", "ers", "\nUser", ":x"]);
        assert_eq!(emitted, ["a", "#b", "\nUsers", "", ""]);
        assert_eq!((matched, rest.as_str()), (Some(1), ""));
    }

    #[test]
    fn held_text_comes_out_at_the_end() {
        assert_eq!(run(&["###"], &["a##"]), (vec!["a".to_owned()], None, "##".to_owned()));
        assert_eq!(run(&[], &["a", "b"]), (vec!["a".to_owned(), "b".to_owned()], None, String::new()));
    }

    #[test]
    fn first_to_be_complete_wins_however_the_text_is_cut() {
        for pieces in [&["xabcd"][..], &["x", "a", "b", "c", "d"]] {
            let (emitted, matched, rest) = run(&["abcd", "bc"], pieces);
            assert_eq!((emitted.concat().as_str(), matched, rest.as_str()), ("xa", Some(1), ""));
        }
    }

    #[test]
    fn empty_long_and_many_stop_strings_are_refused() {
        let new = |stops: Vec<String>| StopMatcher::new(stops).unwrap_err();
        assert_eq!(new(vec!["a".into(), String::new()]), StopStringError::Empty { index: 1 });
        assert_eq!(new(vec!["a".repeat(4097)]), StopStringError::TooLong { index: 0, bytes: 4097 });
        assert_eq!(new(vec!["a".into(); 65]), StopStringError::TooMany { count: 65 });
    }

    /// The definition, applied to the whole text: for every end in order, the longest stop string
    /// that ends there.
    fn naive(text: &str, stops: &[String]) -> (String, Option<usize>) {
        for end in 1..=text.len() {
            let found = (0..stops.len())
                .filter(|&i| text.as_bytes()[..end].ends_with(stops[i].as_bytes()))
                .max_by_key(|&i| (stops[i].len(), std::cmp::Reverse(i)));
            if let Some(index) = found {
                return (text[..end - stops[index].len()].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn stream_equals_search_in_the_whole_text(
            pieces in prop::collection::vec("[abé€]{0,6}", 0..12),
            stops in prop::collection::vec("[abé€]{1,5}", 0..5),
        ) {
            let mut matcher = StopMatcher::new(stops.clone()).unwrap();
            let (mut sent, mut pushed, mut matched) = (String::new(), String::new(), None);
            for piece in &pieces {
                let progress = matcher.push(piece);
                sent.push_str(&progress.emit);
                pushed.push_str(piece);
                matched = matched.or(progress.matched);
                if matched.is_none() {
                    // Exactly the longest suffix of the text that begins a stop string is held
                    // back.
                    let held = pushed.len() - sent.len();
                    let must = (0..=pushed.len())
                        .filter(|&n| stops.iter().any(|s| s.as_bytes().starts_with(&pushed.as_bytes()[pushed.len() - n..])))
                        .max();
                    prop_assert_eq!(held, must.unwrap_or(0));
                }
            }
            sent.push_str(&matcher.finish());
            prop_assert_eq!((sent, matched), naive(&pieces.concat(), &stops));
        }
    }
}
