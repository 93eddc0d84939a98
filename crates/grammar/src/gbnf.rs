// SPDX-License-Identifier: Apache-2.0

//! Translates llama.cpp's grammar notation (GBNF) to Lark.
//!
//! GBNF has no lexer: its rules match characters. The translation therefore distinguishes two kinds
//! of rules:
//!
//! 1. A rule that does not lead back to itself is a regular expression. It becomes a Lark terminal
//!    (`T0`) with exactly the same language.
//! 2. A recursive rule becomes a Lark rule (`r0`). The terminals in it match as many characters as
//!    possible.

use std::collections::HashMap;
use std::fmt::Write;

/// Most parts of a non-recursive rule, those of the rules in it included: a terminal is expanded to
/// one regular expression.
const EXPANDED_PARTS_MAX: usize = 100_000;

/// Why a text is not a GBNF grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GbnfError {
    #[error("line {line}: {problem}")]
    Syntax { line: usize, problem: &'static str },
    #[error("line {line}: the rule {name:?} is not defined")]
    UnknownRule { line: usize, name: String },
    #[error("the rule {name:?} is defined twice")]
    DuplicateRule { name: String },
    #[error("there is no rule \"root\"")]
    NoRoot,
    #[error("expanded, the rules have more than {EXPANDED_PARTS_MAX} parts")]
    TooLarge,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum GbnfToken {
    Name(String),
    Assign,
    Text(String),
    /// A character class in the syntax of regular expressions.
    Class(String),
    Bar,
    Open,
    Close,
    /// `*`, `+`, `?` or `{m,n}`, in Lark's syntax.
    Repeat(String),
}

#[derive(Debug)]
enum GbnfItem {
    Rule(usize),
    Text(String),
    Class(String),
    Group(Vec<Vec<GbnfItem>>),
    Repeat(Box<GbnfItem>, String),
}

#[derive(Debug)]
pub(crate) struct Gbnf {
    /// For each rule number: alternatives, each a sequence of items.
    rules: Vec<Vec<Vec<GbnfItem>>>,
    root: usize,
}

impl Gbnf {
    pub(crate) fn parse(source: &str) -> Result<Self, GbnfError> {
        let tokens = tokenize(source)?;
        let mut names: HashMap<&str, usize> = HashMap::new();
        for pair in tokens.windows(2) {
            if let [(_, GbnfToken::Name(name)), (_, GbnfToken::Assign)] = pair {
                let number = names.len();
                if names.insert(name, number).is_some() {
                    return Err(GbnfError::DuplicateRule { name: name.clone() });
                }
            }
        }
        let root = *names.get("root").ok_or(GbnfError::NoRoot)?;
        let mut parser = GbnfParser { tokens: &tokens, at: 0, names: &names };
        let mut rules = Vec::with_capacity(names.len());
        while parser.at < tokens.len() {
            let begins = matches!(parser.peek_two(), (Some(GbnfToken::Name(_)), Some(GbnfToken::Assign)));
            if !begins {
                return Err(parser.error("a rule is expected: name ::= ..."));
            }
            parser.at += 2;
            rules.push(parser.alternatives()?);
        }
        let gbnf = Self { rules, root };
        match gbnf.count_regular_parts().iter().flatten().any(|&parts| parts > EXPANDED_PARTS_MAX) {
            true => Err(GbnfError::TooLarge),
            false => Ok(gbnf),
        }
    }

    pub(crate) fn rules(&self) -> usize {
        self.rules.len()
    }

    pub(crate) fn to_lark(&self) -> String {
        let regular = self.count_regular_parts();
        let name = |rule: usize| format!("{}{rule}", if regular[rule].is_some() { "T" } else { "r" });
        let mut lark = format!("start: {}\n", name(self.root));
        for (number, alternatives) in self.rules.iter().enumerate() {
            let _ = write!(lark, "{}: ", name(number));
            write_alternatives(&mut lark, alternatives, &name);
            lark.push('\n');
        }
        lark
    }

    /// For each rule: the number of its expanded parts, or `None` if it is recursive or refers to a
    /// recursive rule.
    ///
    /// A rule is settled once all rules that it refers to are settled. Rules on a cycle, or leading
    /// to one, never are.
    fn count_regular_parts(&self) -> Vec<Option<usize>> {
        let mut referenced_by = vec![Vec::new(); self.rules.len()];
        let mut open = vec![0_usize; self.rules.len()];
        for (number, alternatives) in self.rules.iter().enumerate() {
            for_each_reference(alternatives, &mut |rule| {
                referenced_by[rule].push(number);
                open[number] += 1;
            });
        }
        let mut regular = vec![None; self.rules.len()];
        let mut settled: Vec<usize> = (0..open.len()).filter(|&rule| open[rule] == 0).collect();
        while let Some(rule) = settled.pop() {
            let mut parts = 1_usize;
            for_each_reference(&self.rules[rule], &mut |referenced| {
                parts = parts.saturating_add(regular[referenced].unwrap_or(1));
            });
            regular[rule] = Some(parts);
            for &referencing in &referenced_by[rule] {
                open[referencing] -= 1;
                if open[referencing] == 0 {
                    settled.push(referencing);
                }
            }
        }
        regular
    }
}

fn for_each_reference(alternatives: &[Vec<GbnfItem>], visit: &mut impl FnMut(usize)) {
    for item in alternatives.iter().flatten() {
        visit_item(item, visit);
    }
}

fn visit_item(item: &GbnfItem, visit: &mut impl FnMut(usize)) {
    match item {
        GbnfItem::Rule(rule) => visit(*rule),
        GbnfItem::Group(alternatives) => {
            alternatives.iter().flatten().for_each(|item| visit_item(item, visit))
        }
        GbnfItem::Repeat(item, _) => visit_item(item, visit),
        GbnfItem::Text(_) | GbnfItem::Class(_) => {}
    }
}

fn write_alternatives(lark: &mut String, alternatives: &[Vec<GbnfItem>], name: &impl Fn(usize) -> String) {
    for (index, sequence) in alternatives.iter().enumerate() {
        if index > 0 {
            lark.push_str(" | ");
        }
        if sequence.is_empty() {
            lark.push_str("\"\"");
        }
        for (index, item) in sequence.iter().enumerate() {
            if index > 0 {
                lark.push(' ');
            }
            write_item(lark, item, name);
        }
    }
}

fn write_item(lark: &mut String, item: &GbnfItem, name: &impl Fn(usize) -> String) {
    match item {
        GbnfItem::Rule(rule) => lark.push_str(&name(*rule)),
        GbnfItem::Text(text) => lark.push_str(&quote_lark(text)),
        GbnfItem::Class(class) => {
            let _ = write!(lark, "/{class}/");
        }
        GbnfItem::Group(alternatives) => {
            lark.push('(');
            write_alternatives(lark, alternatives, name);
            lark.push(')');
        }
        GbnfItem::Repeat(item, repeat) => {
            write_item(lark, item, name);
            lark.push_str(repeat);
        }
    }
}

/// Quotes a text as a Lark string: JSON's syntax, with control characters escaped.
pub(crate) fn quote_lark(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            '\0'..'\u{20}' | '\u{7f}' => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(character));
            }
            _ => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}

struct GbnfParser<'a> {
    tokens: &'a [(usize, GbnfToken)],
    at: usize,
    names: &'a HashMap<&'a str, usize>,
}

impl GbnfParser<'_> {
    fn peek_two(&self) -> (Option<&GbnfToken>, Option<&GbnfToken>) {
        let token = |at: usize| self.tokens.get(at).map(|(_, token)| token);
        (token(self.at), token(self.at + 1))
    }

    fn line(&self) -> usize {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(line, _)| *line)
    }

    fn error(&self, problem: &'static str) -> GbnfError {
        GbnfError::Syntax { line: self.line(), problem }
    }

    fn alternatives(&mut self) -> Result<Vec<Vec<GbnfItem>>, GbnfError> {
        let mut alternatives = vec![self.sequence()?];
        while self.peek_two().0 == Some(&GbnfToken::Bar) {
            self.at += 1;
            alternatives.push(self.sequence()?);
        }
        Ok(alternatives)
    }

    /// Parses up to a bar, a closing parenthesis, the next rule or the end.
    fn sequence(&mut self) -> Result<Vec<GbnfItem>, GbnfError> {
        let mut items: Vec<GbnfItem> = Vec::new();
        loop {
            let item = match self.peek_two() {
                (Some(GbnfToken::Name(_)), Some(GbnfToken::Assign)) => return Ok(items),
                (Some(GbnfToken::Name(name)), _) => match self.names.get(name.as_str()) {
                    Some(&rule) => GbnfItem::Rule(rule),
                    None => return Err(GbnfError::UnknownRule { line: self.line(), name: name.clone() }),
                },
                (Some(GbnfToken::Text(text)), _) => GbnfItem::Text(text.clone()),
                (Some(GbnfToken::Class(class)), _) => GbnfItem::Class(class.clone()),
                (Some(GbnfToken::Repeat(repeat)), _) => match items.pop() {
                    Some(GbnfItem::Repeat(..)) | None => {
                        return Err(self.error("a repetition needs one thing before it"));
                    }
                    Some(item) => GbnfItem::Repeat(Box::new(item), repeat.clone()),
                },
                (Some(GbnfToken::Open), _) => {
                    self.at += 1;
                    let group = self.alternatives()?;
                    if self.peek_two().0 != Some(&GbnfToken::Close) {
                        return Err(self.error("a parenthesis is not closed"));
                    }
                    GbnfItem::Group(group)
                }
                (Some(GbnfToken::Assign), _) => return Err(self.error("::= without a name before it")),
                (Some(GbnfToken::Bar | GbnfToken::Close) | None, _) => return Ok(items),
            };
            self.at += 1;
            items.push(item);
        }
    }
}

fn tokenize(source: &str) -> Result<Vec<(usize, GbnfToken)>, GbnfError> {
    let mut tokens = Vec::new();
    let mut line = 1;
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let error = |problem| GbnfError::Syntax { line, problem };
        let (token, bytes) = match first {
            '\n' => {
                line += 1;
                (None, 1)
            }
            _ if first.is_whitespace() => (None, first.len_utf8()),
            '#' => (None, rest.find('\n').unwrap_or(rest.len())),
            ':' if rest.starts_with("::=") => (Some(GbnfToken::Assign), 3),
            '|' => (Some(GbnfToken::Bar), 1),
            '(' => (Some(GbnfToken::Open), 1),
            ')' => (Some(GbnfToken::Close), 1),
            '*' | '+' | '?' => (Some(GbnfToken::Repeat(first.to_string())), 1),
            '{' => {
                let end = rest.find('}').ok_or_else(|| error("a brace is not closed"))?;
                (
                    Some(GbnfToken::Repeat(
                        parse_repeat(&rest[1..end])
                            .ok_or_else(|| error("a repetition is {m}, {m,} or {m,n}"))?,
                    )),
                    end + 1,
                )
            }
            '.' => (Some(GbnfToken::Class(r"[\x{0}-\x{10FFFF}]".to_owned())), 1),
            '"' => {
                let (text, bytes) = parse_string(&rest[1..]).map_err(error)?;
                (Some(GbnfToken::Text(text)), bytes + 1)
            }
            '[' => {
                let (class, bytes) = parse_class(&rest[1..]).map_err(error)?;
                (Some(GbnfToken::Class(class)), bytes + 1)
            }
            _ if is_name(first) => {
                let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
                (Some(GbnfToken::Name(rest[..end].to_owned())), end)
            }
            '<' | '!' => return Err(error("tokens of the vocabulary (<...>) are not supported")),
            _ => return Err(error("an unexpected character")),
        };
        tokens.extend(token.map(|token| (line, token)));
        line += rest[..bytes].matches('\n').count() - usize::from(first == '\n');
        rest = &rest[bytes..];
    }
    Ok(tokens)
}

fn is_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-' || character == '_'
}

/// Parses the inside of braces.
fn parse_repeat(inside: &str) -> Option<String> {
    let number = |text: &str| text.trim().parse::<u16>().ok();
    match inside.split_once(',') {
        None => number(inside).map(|count| format!("{{{count}}}")),
        Some((least, most)) if most.trim().is_empty() => number(least).map(|least| format!("{{{least},}}")),
        Some((least, most)) => {
            let least = if least.trim().is_empty() { 0 } else { number(least)? };
            number(most).filter(|&most| most >= least).map(|most| format!("{{{least},{most}}}"))
        }
    }
}

/// Parses a string after its opening quote. Also returns the length with the closing quote.
fn parse_string(source: &str) -> Result<(String, usize), &'static str> {
    let mut text = String::new();
    let mut at = 0;
    loop {
        match source[at..].chars().next() {
            None | Some('\n') => return Err("a string is not closed"),
            Some('"') => return Ok((text, at + 1)),
            Some(_) => {
                let (character, bytes) = parse_character(&source[at..])?;
                text.push(character);
                at += bytes;
            }
        }
    }
}

/// Parses a class after its opening bracket. Also returns the length with the closing bracket.
fn parse_class(source: &str) -> Result<(String, usize), &'static str> {
    let negated = source.starts_with('^');
    let mut class = if negated { "[^".to_owned() } else { "[".to_owned() };
    let mut at = usize::from(negated);
    let start = at;
    loop {
        match source[at..].chars().next() {
            None => return Err("a bracket is not closed"),
            Some(']') if at == start => return Err("a class is empty"),
            Some(']') => {
                class.push(']');
                return Ok((class, at + 1));
            }
            Some(_) => {
                let (low, bytes) = parse_character(&source[at..])?;
                at += bytes;
                let _ = write!(class, "\\x{{{:x}}}", u32::from(low));
                let range = source[at..].strip_prefix('-').filter(|rest| !rest.starts_with(']'));
                if let Some(rest) = range {
                    let (high, bytes) = parse_character(rest)?;
                    at += 1 + bytes;
                    if high < low {
                        return Err("a range in a class is backwards");
                    }
                    let _ = write!(class, "-\\x{{{:x}}}", u32::from(high));
                }
            }
        }
    }
}

/// Parses one character, escaped or not. Also returns its length in bytes.
fn parse_character(source: &str) -> Result<(char, usize), &'static str> {
    let mut characters = source.chars();
    let first = characters.next().ok_or("a string or class is not closed")?;
    if first != '\\' {
        return Ok((first, first.len_utf8()));
    }
    let escaped = characters.next().ok_or("a backslash at the end")?;
    let digits = match escaped {
        'n' => return Ok(('\n', 2)),
        'r' => return Ok(('\r', 2)),
        't' => return Ok(('\t', 2)),
        '\\' | '"' | '[' | ']' | '-' | '^' => return Ok((escaped, 2)),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => return Err("an unknown escape"),
    };
    let number = source.get(2..2 + digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
    let character = number.and_then(char::from_u32).ok_or("a malformed escape of a character's number")?;
    Ok((character, 2 + digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lark(source: &str) -> String {
        Gbnf::parse(source).unwrap().to_lark()
    }

    #[test]
    fn rules_that_are_not_recursive_become_terminals() {
        let source = "root ::= list # the start\nlist ::= \"[\" (item (\",\" item)*)? \"]\"\nitem ::= num | list\nnum ::= [0-9]+";
        assert_eq!(
            lark(source),
            "start: r0\nr0: r1\nr1: \"[\" (r2 (\",\" r2)*)? \"]\"\nr2: T3 | r1\nT3: /[\\x{30}-\\x{39}]/+\n"
        );
    }

    #[test]
    fn classes_strings_and_repetitions_are_translated() {
        assert_eq!(
            lark(r#"root ::= "a\n\"\x41\u00e9" [^\]\-a-c]{2,3} .{4} [-x]{1,}"#),
            "start: T0\nT0: \"a\\u000a\\\"A\u{e9}\" /[^\\x{5d}\\x{2d}\\x{61}-\\x{63}]/{2,3} \
             /[\\x{0}-\\x{10FFFF}]/{4} /[\\x{2d}\\x{78}]/{1,}\n"
        );
    }

    #[test]
    fn syntax_errors_name_their_line() {
        let error = |source: &str| Gbnf::parse(source).unwrap_err().to_string();
        for (source, expected) in [
            ("", "root"),
            ("item ::= \"a\"", "root"),
            ("root ::= item", "line 1: the rule \"item\""),
            ("root ::= \"a\"\n\nb ::= (\"c\"", "line 3: a parenthesis"),
            ("root ::= \"a", "line 1: a string"),
            ("root ::= [a", "a bracket"),
            ("root ::= []", "empty"),
            ("root ::= [b-a]", "backwards"),
            ("root ::= *", "repetition"),
            ("root ::= \"a\"{3,1}", "{m,n}"),
            ("root ::= <[12]>", "not supported"),
            ("root ::= \"\\q\"", "escape"),
            ("root ::= \"a\"\nroot ::= \"b\"", "twice"),
            ("::= \"a\"", "root"),
            ("root ::= \"a\" )", "a rule is expected"),
        ] {
            assert!(error(source).contains(expected), "{source:?}: {}", error(source));
        }
    }
}
