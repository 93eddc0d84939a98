// SPDX-License-Identifier: Apache-2.0

//! The `tojson` filter as templates expect it: the output of Python's `json.dumps`, not HTML-safe
//! JSON.
//!
//! Models were trained on that format (", " and ": " as separators, non-ASCII text and key order
//! kept), so the output must match byte for byte.

use std::io;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Widest indentation, to bound the output of a hostile template.
const MAX_INDENT: usize = 64;

pub(crate) fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let indent = indent(&kwargs)?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    kwargs.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        // With an indentation, Python's item separator has no trailing space.
        None if indent.is_some() => (",", ": "),
        None => (", ", ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be two strings")),
    };

    let failed =
        |source: serde_json::Error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(source);
    let mut json = serde_json::to_value(value).map_err(failed)?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let mut out = Vec::new();
    let style = PythonJsonFormatter {
        indent,
        item,
        key,
        ensure_ascii: ensure_ascii == Some(true),
        depth: 0,
        filled: false,
    };
    json.serialize(&mut Serializer::with_formatter(&mut out, style)).map_err(failed)?;
    String::from_utf8(out)
        .map_err(|source| Error::new(ErrorKind::BadSerialization, "tojson").with_source(source))
}

/// A JSON object as Python's `json.dumps(value, ensure_ascii=False)` writes it.
pub(crate) fn dumps(object: &serde_json::Map<String, serde_json::Value>) -> String {
    let mut out = Vec::new();
    let style = PythonJsonFormatter {
        indent: None,
        item: ", ",
        key: ": ",
        ensure_ascii: false,
        depth: 0,
        filled: false,
    };
    // Writing JSON values to memory cannot fail.
    match object.serialize(&mut Serializer::with_formatter(&mut out, style)) {
        Ok(()) => String::from_utf8_lossy(&out).into_owned(),
        Err(_) => String::new(),
    }
}

/// Reads `indent`: a number of spaces, a string, or nothing.
fn indent(kwargs: &Kwargs) -> Result<Option<String>, Error> {
    let Some(indent) = kwargs.get::<Option<Value>>("indent")?.filter(|value| !value.is_none()) else {
        return Ok(None);
    };
    let text = match (indent.as_str(), indent.as_usize()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(blanks)) if blanks <= MAX_INDENT => " ".repeat(blanks),
        _ => {
            return Err(Error::new(ErrorKind::InvalidOperation, "indent must be a small number or a string"));
        }
    };
    match text.len() <= MAX_INDENT {
        true => Ok(Some(text)),
        false => Err(Error::new(ErrorKind::InvalidOperation, "indent is too long")),
    }
}

struct PythonJsonFormatter<'a> {
    indent: Option<String>,
    item: &'a str,
    key: &'a str,
    ensure_ascii: bool,
    depth: usize,
    /// Whether the list or object that is being closed has entries. Empty ones stay on one line.
    filled: bool,
}

impl PythonJsonFormatter<'_> {
    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }

    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        writer.write_all(bracket)
    }

    fn entry<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(writer)?;
        }
        self.filled = true;
        writer.write_all(bracket)
    }
}

impl Formatter for PythonJsonFormatter<'_> {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.entry(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.entry(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(text.as_bytes());
        }
        for c in text.chars() {
            if matches!(c, ' '..='~') {
                writer.write_all(&[c as u8])?;
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};

    fn dump(arguments: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", super::tojson);
        let value: serde_json::Value = serde_json::from_str(
            r#"{"b": [1, 2.5, true, null], "a": {"<é'>": "x\n😀\u007f"}, "e": [], "o": {}}"#,
        )
        .unwrap();
        let template = format!("{{{{ value | tojson{arguments} }}}}");
        environment
            .render_str(
                &template,
                context! { value => minijinja::Value::from(minijinja::value::Serde(&value)) },
            )
            .unwrap()
    }

    // Expected texts are the output of Python 3.11: json.dumps(value, ensure_ascii=False, ...).
    #[test]
    fn output_is_that_of_python() {
        assert_eq!(
            dump(""),
            "{\"b\": [1, 2.5, true, null], \"a\": {\"<é'>\": \"x\\n😀\u{7f}\"}, \"e\": [], \"o\": {}}"
        );
        assert_eq!(
            dump("(ensure_ascii=true, sort_keys=true, separators=(',', ':'))"),
            r#"{"a":{"<\u00e9'>":"x\n\ud83d\ude00\u007f"},"b":[1,2.5,true,null],"e":[],"o":{}}"#
        );
        assert_eq!(
            dump("(indent=2)"),
            "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": {\n    \"<é'>\": \"x\\n😀\u{7f}\"\n  },\n  \"e\": [],\n  \"o\": {}\n}"
        );
    }
}
