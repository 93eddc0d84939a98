//! The printable alphabet in which byte-level vocabularies are written (GPT-2's): every byte is one code point.
//!
//! Bytes 33-126, 161-172 and 174-255 stand for themselves; the other 68, in increasing order, are U+0100, U+0101, ...
//! (so a space is U+0120 and a newline U+010A).

const fn is_itself(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

/// Code point - 0 .. code point - 0x143 to byte; `None` where the alphabet has a hole.
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

/// Appends the bytes that `text` stands for; false, with `out` unchanged, if a character is outside the alphabet.
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
        assert_eq!(out, " a\né".as_bytes(), "a refused text leaves nothing behind");
    }
}
