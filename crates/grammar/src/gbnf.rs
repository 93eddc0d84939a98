//! llama.cpp's grammar notation (GBNF), rewritten as Lark.
//!
//! GBNF has no lexer: it speaks of characters. A rule that does not come back to itself is a regular expression and
//! becomes a Lark terminal, so that it means exactly what it says; recursive rules become Lark rules, in which a terminal
//! takes as many characters as it can.

use std::collections::HashMap;
use std::fmt::Write;

/// Parts of a rule that does not recur, with those of the rules in it: as a regular expression it is written out.
const EXPANDED_MAX: usize = 100_000;

/// A GBNF source that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GbnfError {
    #[error("line {line}: {problem}")]
    Syntax { line: usize, problem: &'static str },
    #[error("line {line}: the rule {name:?} is not defined")]
    UnknownRule { line: usize, name: String },
    #[error("the rule {name:?} is defined twice")]
    Twice { name: String },
    #[error("there is no rule \"root\"")]
    NoRoot,
    #[error("written out, the rules have more than {EXPANDED_MAX} parts")]
    TooLarge,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Name(String),
    Assign,
    Text(String),
    /// As a regular expression's class.
    Class(String),
    Bar,
    Open,
    Close,
    /// `*`, `+`, `?` or `{m,n}`, as Lark writes them.
    Repeat(String),
}

#[derive(Debug)]
enum Item {
    Rule(usize),
    Text(String),
    Class(String),
    Group(Vec<Vec<Item>>),
    Repeat(Box<Item>, String),
}

#[derive(Debug)]
pub(crate) struct Gbnf {
    /// Alternatives of sequences, by number of the rule.
    rules: Vec<Vec<Vec<Item>>>,
    root: usize,
}

impl Gbnf {
    pub(crate) fn parse(source: &str) -> Result<Self, GbnfError> {
        let tokens = tokens(source)?;
        let mut names: HashMap<&str, usize> = HashMap::new();
        for pair in tokens.windows(2) {
            if let [(_, Token::Name(name)), (_, Token::Assign)] = pair {
                let number = names.len();
                if names.insert(name, number).is_some() {
                    return Err(GbnfError::Twice { name: name.clone() });
                }
            }
        }
        let root = *names.get("root").ok_or(GbnfError::NoRoot)?;
        let mut parser = Parser { tokens: &tokens, at: 0, names: &names };
        let mut rules = Vec::with_capacity(names.len());
        while parser.at < tokens.len() {
            let begins = matches!(parser.ahead(), (Some(Token::Name(_)), Some(Token::Assign)));
            if !begins {
                return Err(parser.error("a rule is expected: name ::= ..."));
            }
            parser.at += 2;
            rules.push(parser.alternatives()?);
        }
        let gbnf = Self { rules, root };
        match gbnf.regular().iter().flatten().any(|&parts| parts > EXPANDED_MAX) {
            true => Err(GbnfError::TooLarge),
            false => Ok(gbnf),
        }
    }

    pub(crate) fn rules(&self) -> usize {
        self.rules.len()
    }

    pub(crate) fn to_lark(&self) -> String {
        let regular = self.regular();
        let name = |rule: usize| format!("{}{rule}", if regular[rule].is_some() { "T" } else { "r" });
        let mut lark = format!("start: {}\n", name(self.root));
        for (number, alternatives) in self.rules.iter().enumerate() {
            let _ = write!(lark, "{}: ", name(number));
            write_alternatives(&mut lark, alternatives, &name);
            lark.push('\n');
        }
        lark
    }

    /// The rules that lead to no rule that leads back to itself, with the parts that they have written out. Rules are
    /// settled once all that they mention are: what is on a circle, or leads to one, never is.
    fn regular(&self) -> Vec<Option<usize>> {
        let mut mentioned_by = vec![Vec::new(); self.rules.len()];
        let mut open = vec![0_usize; self.rules.len()];
        for (number, alternatives) in self.rules.iter().enumerate() {
            each_mention(alternatives, &mut |rule| {
                mentioned_by[rule].push(number);
                open[number] += 1;
            });
        }
        let mut regular = vec![None; self.rules.len()];
        let mut settled: Vec<usize> = (0..open.len()).filter(|&rule| open[rule] == 0).collect();
        while let Some(rule) = settled.pop() {
            let mut parts = 1_usize;
            each_mention(&self.rules[rule], &mut |mentioned| {
                parts = parts.saturating_add(regular[mentioned].unwrap_or(1));
            });
            regular[rule] = Some(parts);
            for &mentioning in &mentioned_by[rule] {
                open[mentioning] -= 1;
                if open[mentioning] == 0 {
                    settled.push(mentioning);
                }
            }
        }
        regular
    }
}

fn each_mention(alternatives: &[Vec<Item>], see: &mut impl FnMut(usize)) {
    for item in alternatives.iter().flatten() {
        see_item(item, see);
    }
}

fn see_item(item: &Item, see: &mut impl FnMut(usize)) {
    match item {
        Item::Rule(rule) => see(*rule),
        Item::Group(alternatives) => alternatives.iter().flatten().for_each(|item| see_item(item, see)),
        Item::Repeat(item, _) => see_item(item, see),
        Item::Text(_) | Item::Class(_) => {}
    }
}

fn write_alternatives(lark: &mut String, alternatives: &[Vec<Item>], name: &impl Fn(usize) -> String) {
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

fn write_item(lark: &mut String, item: &Item, name: &impl Fn(usize) -> String) {
    match item {
        Item::Rule(rule) => lark.push_str(&name(*rule)),
        Item::Text(text) => lark.push_str(&quoted(text)),
        Item::Class(class) => {
            let _ = write!(lark, "/{class}/");
        }
        Item::Group(alternatives) => {
            lark.push('(');
            write_alternatives(lark, alternatives, name);
            lark.push(')');
        }
        Item::Repeat(item, repeat) => {
            write_item(lark, item, name);
            lark.push_str(repeat);
        }
    }
}

/// A Lark string: JSON's syntax without raw control characters.
pub(crate) fn quoted(text: &str) -> String {
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

struct Parser<'a> {
    tokens: &'a [(usize, Token)],
    at: usize,
    names: &'a HashMap<&'a str, usize>,
}

impl Parser<'_> {
    fn ahead(&self) -> (Option<&Token>, Option<&Token>) {
        let token = |at: usize| self.tokens.get(at).map(|(_, token)| token);
        (token(self.at), token(self.at + 1))
    }

    fn line(&self) -> usize {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(line, _)| *line)
    }

    fn error(&self, problem: &'static str) -> GbnfError {
        GbnfError::Syntax { line: self.line(), problem }
    }

    fn alternatives(&mut self) -> Result<Vec<Vec<Item>>, GbnfError> {
        let mut alternatives = vec![self.sequence()?];
        while self.ahead().0 == Some(&Token::Bar) {
            self.at += 1;
            alternatives.push(self.sequence()?);
        }
        Ok(alternatives)
    }

    /// Up to a bar, a closing parenthesis, the next rule or the end.
    fn sequence(&mut self) -> Result<Vec<Item>, GbnfError> {
        let mut items: Vec<Item> = Vec::new();
        loop {
            let item = match self.ahead() {
                (Some(Token::Name(_)), Some(Token::Assign)) => return Ok(items),
                (Some(Token::Name(name)), _) => match self.names.get(name.as_str()) {
                    Some(&rule) => Item::Rule(rule),
                    None => return Err(GbnfError::UnknownRule { line: self.line(), name: name.clone() }),
                },
                (Some(Token::Text(text)), _) => Item::Text(text.clone()),
                (Some(Token::Class(class)), _) => Item::Class(class.clone()),
                (Some(Token::Repeat(repeat)), _) => match items.pop() {
                    Some(Item::Repeat(..)) | None => {
                        return Err(self.error("a repetition needs one thing before it"));
                    }
                    Some(item) => Item::Repeat(Box::new(item), repeat.clone()),
                },
                (Some(Token::Open), _) => {
                    self.at += 1;
                    let group = self.alternatives()?;
                    if self.ahead().0 != Some(&Token::Close) {
                        return Err(self.error("a parenthesis is not closed"));
                    }
                    Item::Group(group)
                }
                (Some(Token::Assign), _) => return Err(self.error("::= without a name before it")),
                (Some(Token::Bar | Token::Close) | None, _) => return Ok(items),
            };
            self.at += 1;
            items.push(item);
        }
    }
}

fn tokens(source: &str) -> Result<Vec<(usize, Token)>, GbnfError> {
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
            ':' if rest.starts_with("::=") => (Some(Token::Assign), 3),
            '|' => (Some(Token::Bar), 1),
            '(' => (Some(Token::Open), 1),
            ')' => (Some(Token::Close), 1),
            '*' | '+' | '?' => (Some(Token::Repeat(first.to_string())), 1),
            '{' => {
                let end = rest.find('}').ok_or_else(|| error("a brace is not closed"))?;
                (
                    Some(Token::Repeat(repeat(&rest[1..end]).ok_or_else(|| error("{m}, {m,} or {m,n}"))?)),
                    end + 1,
                )
            }
            '.' => (Some(Token::Class(r"[\x{0}-\x{10FFFF}]".to_owned())), 1),
            '"' => {
                let (text, bytes) = text(&rest[1..]).map_err(error)?;
                (Some(Token::Text(text)), bytes + 1)
            }
            '[' => {
                let (class, bytes) = class(&rest[1..]).map_err(error)?;
                (Some(Token::Class(class)), bytes + 1)
            }
            _ if is_name(first) => {
                let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
                (Some(Token::Name(rest[..end].to_owned())), end)
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

/// The inside of braces.
fn repeat(inside: &str) -> Option<String> {
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

/// A string after its opening quote, and the bytes up to the closing one.
fn text(source: &str) -> Result<(String, usize), &'static str> {
    let mut text = String::new();
    let mut at = 0;
    loop {
        match source[at..].chars().next() {
            None | Some('\n') => return Err("a string is not closed"),
            Some('"') => return Ok((text, at + 1)),
            Some(_) => {
                let (character, bytes) = character(&source[at..])?;
                text.push(character);
                at += bytes;
            }
        }
    }
}

/// A class after its opening bracket, and the bytes up to the closing one.
fn class(source: &str) -> Result<(String, usize), &'static str> {
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
                let (low, bytes) = character(&source[at..])?;
                at += bytes;
                let _ = write!(class, "\\x{{{:x}}}", u32::from(low));
                let range = source[at..].strip_prefix('-').filter(|rest| !rest.starts_with(']'));
                if let Some(rest) = range {
                    let (high, bytes) = character(rest)?;
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

/// One character, escaped or not, and its bytes.
fn character(source: &str) -> Result<(char, usize), &'static str> {
    let mut characters = source.chars();
    let first = characters.next().ok_or("something is not closed")?;
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
    fn rules_that_do_not_recur_become_terminals() {
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
    fn mistakes_are_named_with_their_line() {
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
