// SPDX-License-Identifier: Apache-2.0

//! [`KvTypes`]: the KV cache element type of each layer of a model.
//!
//! The text form is a type for all layers, then exceptions for ranges of layers counted from 0:
//! `q8_0`, or `q8_0,0-1=f16,7=f32`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::{AttentionSpan, KvLayer, KvType, UnknownKvType};

/// Element types by layer. Equal values have equal text, independent of the text that was parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvTypes {
    rest: KvType,
    /// Ascending and disjoint ranges. No range has type `rest`; neighbours of one type are joined.
    parts: Vec<(RangeInclusive<u16>, KvType)>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvTypesError {
    #[error(transparent)]
    Type(#[from] UnknownKvType),
    #[error("{text:?} is not LAYER=TYPE or FIRST-LAST=TYPE, as in 0-3=f16 with layers counted from 0")]
    Layers { text: String },
    #[error("two KV cache types are given for layer {layer}")]
    Twice { layer: u16 },
    #[error("a KV cache type is given for layer {layer}, but the model has {layers} layers, counted from 0")]
    Beyond { layer: u16, layers: usize },
}

impl KvTypes {
    fn new(rest: KvType, mut given: Vec<(RangeInclusive<u16>, KvType)>) -> Result<Self, KvTypesError> {
        given.sort_by_key(|(layers, _)| *layers.start());
        let mut last = None;
        let mut parts: Vec<(RangeInclusive<u16>, KvType)> = Vec::with_capacity(given.len());
        for (layers, kind) in given {
            let (start, end) = (*layers.start(), *layers.end());
            if last.is_some_and(|last| start <= last) {
                return Err(KvTypesError::Twice { layer: start });
            }
            last = Some(end);
            match parts.last_mut() {
                _ if kind == rest => {}
                Some((before, of_before)) if *of_before == kind && before.end() + 1 == start => {
                    *before = *before.start()..=end;
                }
                _ => parts.push((layers, kind)),
            }
        }
        Ok(Self { rest, parts })
    }

    /// The type of layers without an exception.
    pub fn rest(&self) -> KvType {
        self.rest
    }

    pub fn of(&self, layer: usize) -> KvType {
        let of_layer = |(layers, _): &&(RangeInclusive<u16>, KvType)| {
            (usize::from(*layers.start())..=usize::from(*layers.end())).contains(&layer)
        };
        self.parts.iter().find(of_layer).map_or(self.rest, |(_, kind)| *kind)
    }

    /// The layers of a model with full attention and one shape in all layers.
    pub fn layers(&self, count: usize, kv_heads: usize, head_dim: usize) -> Vec<KvLayer> {
        let layer = |layer| KvLayer { kv_heads, head_dim, kind: self.of(layer), span: AttentionSpan::Full };
        (0..count).map(layer).collect()
    }

    /// Checks that a model of `layers` layers has the layers of all exceptions.
    pub fn check(&self, layers: usize) -> Result<(), KvTypesError> {
        match self.parts.last().map(|(named, _)| *named.end()) {
            Some(layer) if usize::from(layer) >= layers => Err(KvTypesError::Beyond { layer, layers }),
            _ => Ok(()),
        }
    }
}

impl From<KvType> for KvTypes {
    fn from(rest: KvType) -> Self {
        Self { rest, parts: Vec::new() }
    }
}

impl fmt::Display for KvTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rest.fmt(f)?;
        self.parts.iter().try_for_each(|(layers, kind)| match (layers.start(), layers.end()) {
            (first, last) if first == last => write!(f, ",{first}={kind}"),
            (first, last) => write!(f, ",{first}-{last}={kind}"),
        })
    }
}

impl FromStr for KvTypes {
    type Err = KvTypesError;

    fn from_str(text: &str) -> Result<Self, KvTypesError> {
        let (rest, parts) = text.split_once(',').map_or((text, None), |(rest, parts)| (rest, Some(parts)));
        let rest = rest.trim().parse()?;
        let part = |text: &str| {
            let unclear = || KvTypesError::Layers { text: text.trim().to_owned() };
            let (layers, kind) = text.split_once('=').ok_or_else(unclear)?;
            let (first, last) = layers.split_once('-').unwrap_or((layers, layers));
            let number = |text: &str| text.trim().parse::<u16>().map_err(|_| unclear());
            let layers = number(first)?..=number(last)?;
            if layers.is_empty() {
                return Err(unclear());
            }
            Ok((layers, kind.trim().parse::<KvType>()?))
        };
        let parts = parts.map_or(Ok(Vec::new()), |parts| parts.split(',').map(part).collect())?;
        Self::new(rest, parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(text: &str) -> KvTypes {
        text.parse().unwrap()
    }

    #[test]
    fn text_round_trips() {
        for text in ["f16", "q8_0", "q8_0,0-1=f16", "f32,3=bf16", "q8_0,0-1=f16,7=f32,9-31=bf16"] {
            assert_eq!(types(text).to_string(), text);
        }
        assert_eq!(KvTypes::default().to_string(), "f16");
        assert_eq!(KvTypes::from(KvType::Q8_0), types("q8_0"));
    }

    #[test]
    fn equal_assignments_have_equal_text() {
        for text in ["q8_0,2=f16,0-1=f16", "q8_0, 0=f16, 1-2 = f16, 5=q8_0", "q8_0,0-2=f16"] {
            assert_eq!(types(text).to_string(), "q8_0,0-2=f16", "{text}");
        }
        // Ranges that differ in type or do not touch stay apart.
        assert_eq!(types("q8_0,0=f16,1=f32,3=f32").to_string(), "q8_0,0=f16,1=f32,3=f32");
    }

    #[test]
    fn layers_get_the_type_of_their_range() {
        let types = types("q8_0,0-1=f16,3=f32");
        let kinds: Vec<KvType> = types.layers(5, 2, 64).iter().map(|layer| layer.kind).collect();
        assert_eq!(kinds, [KvType::F16, KvType::F16, KvType::Q8_0, KvType::F32, KvType::Q8_0]);
        assert_eq!(types.rest(), KvType::Q8_0);
        let first = KvLayer { kv_heads: 2, head_dim: 64, kind: KvType::F16, span: AttentionSpan::Full };
        assert_eq!(types.layers(1, 2, 64)[0], first);
    }

    #[test]
    fn parse_errors_quote_the_wrong_part() {
        let refused = |text: &str| text.parse::<KvTypes>().unwrap_err().to_string();
        for (text, part) in [
            ("", "\"\" is not a KV cache type; use f32, f16, bf16 or q8_0"),
            ("q4_0", "\"q4_0\" is not a KV cache type"),
            ("f16,", "\"\" is not LAYER=TYPE or FIRST-LAST=TYPE"),
            ("f16,q8_0", "\"q8_0\" is not LAYER=TYPE"),
            ("f16,x=q8_0", "\"x=q8_0\" is not LAYER=TYPE"),
            ("f16,3-1=q8_0", "\"3-1=q8_0\" is not LAYER=TYPE"),
            ("f16,-1=q8_0", "is not LAYER=TYPE"),
            ("f16,70000=q8_0", "is not LAYER=TYPE"),
            ("f16,1=int8", "\"int8\" is not a KV cache type"),
            ("f16,0-3=q8_0,3=f32", "two KV cache types are given for layer 3"),
            ("f16,5=q8_0,5=q8_0", "given for layer 5"),
            ("f16,5=f16,5=q8_0", "given for layer 5"),
        ] {
            assert!(refused(text).contains(part), "{text:?}: {}", refused(text));
        }
    }

    #[test]
    fn layers_beyond_the_model_are_refused() {
        assert_eq!(types("f16,2-3=q8_0").check(4), Ok(()));
        let beyond = types("f16,2-3=q8_0").check(3).unwrap_err();
        assert_eq!(beyond, KvTypesError::Beyond { layer: 3, layers: 3 });
        assert_eq!(
            beyond.to_string(),
            "a KV cache type is given for layer 3, but the model has 3 layers, counted from 0"
        );
        assert_eq!(types("q8_0").check(0), Ok(()));
    }
}
