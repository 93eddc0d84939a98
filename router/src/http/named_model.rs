// SPDX-License-Identifier: Apache-2.0

//! Finds the name of the model in a body of JSON without parsing it, to see whether the router
//! knows the model.

use memchr::memmem;

const KEY: &[u8] = b"\"model\"";

/// The string behind the first `"model"` of the body. It may be wrong, if an earlier string or an
/// inner object has that name: a guess is for a decision that parsing then corrects.
pub(super) fn named_model(body: &[u8]) -> Option<&str> {
    let after_key = &body[memmem::find(body, KEY)? + KEY.len()..];
    let value = after_key.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start().strip_prefix(b"\"")?;
    let name = &value[..memchr::memchr2(b'"', b'\\', value)?];
    // An escape is left to the parser.
    (value.get(name.len()) == Some(&b'"')).then(|| std::str::from_utf8(name).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_found_wherever_it_stands_and_nothing_else_panics() {
        let find = |body: &'static str| named_model(body.as_bytes());
        assert_eq!(find(r#"{"model":"m","prompt":"x"}"#), Some("m"));
        assert_eq!(
            find("{\"prompt\": \"say \\\"model\\\": \\\"no\\\"\",\n \"model\" :\t\"a/b é\" }"),
            Some("a/b é")
        );
        for body in ["", "{}", r#"{"model""#, r#"{"model":"#, r#"{"model":null}"#, r#"{"model":"m"#] {
            assert_eq!(find(body), None, "{body}");
        }
        assert_eq!(find(r#"{"model":"a\u0062"}"#), None);
        assert_eq!(named_model(b"{\"model\":\"\xff\"}"), None);
    }
}
