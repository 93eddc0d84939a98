// SPDX-License-Identifier: Apache-2.0

//! Source text without comments and literals, line by line, for checks that count braces or words.

/// Replaces comments, strings and character literals of Rust or CUDA C++ by spaces. Line breaks
/// stay, so that line numbers and columns are those of the original.
pub(super) fn without_literals(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => find(bytes, at, b"\n"),
            b'/' if bytes[at..].starts_with(b"/*") => find(bytes, at + 2, b"*/") + 2,
            b'"' => end_of_string(bytes, at + 1),
            b'r' if starts_raw_string(bytes, at) => end_of_raw_string(bytes, at),
            b'\'' => end_of_character(bytes, at),
            _ => {
                at += 1;
                continue;
            }
        };
        let end = end.min(bytes.len());
        out[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at = end.max(at + 1);
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn find(bytes: &[u8], from: usize, what: &[u8]) -> usize {
    let from = from.min(bytes.len());
    let found = bytes[from..].windows(what.len()).position(|window| window == what);
    found.map_or(bytes.len(), |offset| from + offset)
}

fn end_of_string(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

/// `r"` or `r#"` that does not continue an identifier.
fn starts_raw_string(bytes: &[u8], at: usize) -> bool {
    let continues = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    let hashes = bytes[at + 1..].iter().take_while(|byte| **byte == b'#').count();
    // A byte string `br"` is a raw string too; its `b` stays, which harms nothing.
    let byte_string = continues && bytes[at - 1] == b'b';
    (!continues || byte_string) && bytes.get(at + 1 + hashes) == Some(&b'"')
}

fn end_of_raw_string(bytes: &[u8], at: usize) -> usize {
    let hashes = bytes[at + 1..].iter().take_while(|byte| **byte == b'#').count();
    let mut close = vec![b'"'];
    close.resize(1 + hashes, b'#');
    find(bytes, at + 2 + hashes, &close) + close.len()
}

/// A character literal, or nothing if the quote begins a lifetime.
fn end_of_character(bytes: &[u8], at: usize) -> usize {
    match bytes.get(at + 1) {
        Some(b'\\') => find(bytes, at + 3, b"'") + 1,
        Some(_) => {
            // One character of at most four bytes, then the closing quote.
            let close = (at + 2..=at + 5).find(|&close| bytes.get(close) == Some(&b'\''));
            let is_lifetime = bytes[at + 1].is_ascii_alphabetic() && bytes.get(at + 2) != Some(&b'\'');
            match close {
                Some(close) if !is_lifetime => close + 1,
                _ => at + 1,
            }
        }
        None => at + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::without_literals;

    #[test]
    fn literals_and_comments_become_spaces() {
        for (text, expected) in [
            ("a \"{\" b", "a     b"),
            ("a // {\nb", "a     \nb"),
            ("a /* { */ b", "a         b"),
            ("'{' 'a str", "     a str"),
            ("r#\"{\"}\"# }", "         }"),
            ("\"\\\"{\" }", "      }"),
        ] {
            assert_eq!(without_literals(text), expected, "{text}");
        }
    }
}
