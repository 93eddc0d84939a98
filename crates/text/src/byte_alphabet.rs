// SPDX-License-Identifier: Apache-2.0

//! GPT-2's byte alphabet: byte-level vocabularies write each byte as one printable code point.
//!
//! Bytes 33-126, 161-172 and 174-255 are written as themselves. The other 68 bytes, in increasing
//! order, are written as U+0100, U+0101, and so on. A space is U+0120 and a newline is U+010A.

const fn is_itself(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

/// Maps a code point below 0x144 to its byte; `None` for code points that the alphabet does not
/// use.
const BYTE_OF: [Option<u8>; 0x144] = {
    let mut table = [None; 0x144];
    let mut displaced = 0x100;
    let mut byte = 0;
    while byte < 256 {
        if is_itself(byte as u8) {
            table[byte] = Some(byte as u8);
        } else {
            table[displaced] = Some(byte as u8);
            displaced += 1;
        }
        byte += 1;
    }
    table
};

/// Appends the bytes that `text` encodes. Returns false and leaves `out` unchanged if a character
/// is outside the alphabet.
pub(crate) fn decode_into(text: &str, out: &mut Vec<u8>) -> bool {
    let before = out.len();
    for c in text.chars() {
        match BYTE_OF.get(c as usize).copied().flatten() {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(before);
                return false;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_maps_all_256_bytes_once() {
        let mut bytes: Vec<u8> = BYTE_OF.iter().flatten().copied().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn known_letters_decode() {
        let mut out = vec![];
        assert!(decode_into("ĠaĊÃ©", &mut out));
        assert_eq!(out, " a\né".as_bytes());
        assert!(!decode_into("a▁", &mut out), "U+2581 is outside the alphabet");
        assert_eq!(out, " a\né".as_bytes(), "a text outside the alphabet appends nothing");
    }
}
