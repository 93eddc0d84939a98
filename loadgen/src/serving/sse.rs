// SPDX-License-Identifier: Apache-2.0

//! Splits a response into server-sent events.

/// The data of one event. An answer's event has one token and its log probabilities.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// An event, or a line, has more than 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventTooLong;

/// Takes bytes as they come, and returns the data of complete events. Other fields and comments are
/// skipped. An event without its blank line is incomplete and is never returned.
#[derive(Debug, Default)]
pub struct SseReader {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
}

impl SseReader {
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, EventTooLong> {
        let mut events = Vec::new();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let Some(end) = part.strip_suffix(b"\n") else {
                self.extend_line(part)?;
                continue;
            };
            self.extend_line(end)?;
            let line = std::mem::take(&mut self.line);
            events.extend(self.end_line(line.strip_suffix(b"\r").unwrap_or(&line))?);
        }
        Ok(events)
    }

    fn extend_line(&mut self, part: &[u8]) -> Result<(), EventTooLong> {
        self.line.extend_from_slice(part);
        if self.line.len() > EVENT_BYTES_MAX { Err(EventTooLong) } else { Ok(()) }
    }

    fn end_line(&mut self, line: &[u8]) -> Result<Option<String>, EventTooLong> {
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            let is_event = std::mem::take(&mut self.has_data);
            return Ok(is_event.then(|| String::from_utf8_lossy(&data).into_owned()));
        }
        if let Some(value) = line.strip_prefix(b"data:") {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.has_data = true;
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            if self.data.len() > EVENT_BYTES_MAX {
                return Err(EventTooLong);
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] =
        b": comment\nid: 1\ndata: {\"a\": 1}\n\ndata:two\r\ndata: lines\r\n\r\n\n\ndata: \xc3\xa9\n\n\
        data: [DONE]\n\ndata: cut";

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        for size in [1, 2, 3, 7, 1000] {
            let mut reader = SseReader::default();
            let events: Vec<String> =
                STREAM.chunks(size).flat_map(|part| reader.push(part).unwrap()).collect();
            assert_eq!(events, ["{\"a\": 1}", "two\nlines", "é", "[DONE]"], "parts of {size} bytes");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let push_all = |part: &[u8]| {
            let mut reader = SseReader::default();
            (0..2000).try_for_each(|_| reader.push(part).map(|_| ()))
        };
        assert_eq!(push_all(&[b'x'; 1000]), Err(EventTooLong));
        let mut line = b"data: ".to_vec();
        line.extend([b'x'; 1000]);
        line.push(b'\n');
        assert_eq!(push_all(&line), Err(EventTooLong));
    }
}
