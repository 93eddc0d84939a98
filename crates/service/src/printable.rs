// SPDX-License-Identifier: Apache-2.0

//! Text from files and clients, made safe for terminals, logs and answers.

/// True for characters that change what a terminal shows elsewhere: control characters (escape
/// sequences begin with one), and those that change the direction of the text around them.
fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text on one line: unsafe characters are escaped as in Rust, `\u{1b}` for example.
pub fn printable(text: &str) -> String {
    escape(text, |_| false)
}

/// The same, except that line breaks and tabs stay: for text of several lines.
pub fn printable_lines(text: &str) -> String {
    escape(text, |character| matches!(character, '\n' | '\t'))
}

/// At most `chars_max` characters of [`printable`] text, for quotes of what a client sent.
pub fn excerpt(text: &str, chars_max: usize) -> String {
    let mut shown: String = text.chars().take(chars_max + 1).collect();
    match shown.char_indices().nth(chars_max) {
        None => printable(&shown),
        Some((cut, _)) => {
            shown.truncate(cut);
            format!("{}... ({} bytes)", printable(&shown), text.len())
        }
    }
}

fn escape(text: &str, stays: impl Fn(char) -> bool) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match is_unsafe(character) && !stays(character) {
            true => safe.extend(character.escape_default()),
            false => safe.push(character),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_and_directions_are_visible_and_other_text_stays() {
        assert_eq!(printable("a\u{1b}[2Jb\n\u{9b}\u{202e}\u{7f}"), "a\\u{1b}[2Jb\\n\\u{9b}\\u{202e}\\u{7f}");
        assert_eq!(printable("grün — 🙂 \\ \"quoted\""), "grün — 🙂 \\ \"quoted\"");
        assert_eq!(printable_lines("a\tb\nc\r\u{1b}"), "a\tb\nc\\r\\u{1b}");
    }

    #[test]
    fn an_excerpt_is_bounded_and_says_what_it_left_out() {
        assert_eq!(excerpt("über", 4), "über");
        assert_eq!(excerpt(&"ü".repeat(500_000), 3), "üüü... (1000000 bytes)");
        assert_eq!(excerpt("\u{1b}\u{1b}", 1), "\\u{1b}... (2 bytes)");
    }
}
