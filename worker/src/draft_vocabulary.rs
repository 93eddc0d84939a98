// SPDX-License-Identifier: Apache-2.0

//! Checks that a draft model has the same vocabulary as the model it drafts for.

use gguf::{KeyError, Metadata, StringArray};

/// Metadata key of the texts of all tokens, in the order of their ids.
const TOKENS_KEY: &str = "tokenizer.ggml.tokens";
/// Models of one family pad their vocabularies to different sizes. Padding tokens are never
/// sampled.
const PADDING_MAX: usize = 512;

#[derive(Debug, thiserror::Error)]
pub enum DraftVocabularyError {
    #[error("model {model:?} has no usable vocabulary")]
    Key { model: String, source: KeyError },
    #[error(
        "model {draft:?} cannot draft for {model:?}: it has {draft_tokens} tokens, {model:?} has {tokens}"
    )]
    Size { model: String, draft: String, tokens: usize, draft_tokens: usize },
    #[error(
        "model {draft:?} cannot draft for {model:?}: token {id} is {found:?}, {model:?} has {expected:?}"
    )]
    Token { model: String, draft: String, id: usize, expected: String, found: String },
}

/// A model's name and metadata.
pub(crate) type NamedMetadata<'a> = (&'a str, &'a Metadata);

/// Both models must have the same text for every id that both have.
pub(crate) fn check(model: NamedMetadata<'_>, draft: NamedMetadata<'_>) -> Result<(), DraftVocabularyError> {
    let ((name, _), (draft_name, _)) = (model, draft);
    let (tokens, draft_tokens) = (token_texts(model)?, token_texts(draft)?);
    if tokens.len().abs_diff(draft_tokens.len()) > PADDING_MAX {
        return Err(DraftVocabularyError::Size {
            model: name.to_owned(),
            draft: draft_name.to_owned(),
            tokens: tokens.len(),
            draft_tokens: draft_tokens.len(),
        });
    }
    match tokens.iter().zip(&draft_tokens).enumerate().find(|(_, (expected, found))| expected != found) {
        None => Ok(()),
        Some((id, (expected, found))) => Err(DraftVocabularyError::Token {
            model: name.to_owned(),
            draft: draft_name.to_owned(),
            id,
            expected: String::from_utf8_lossy(expected).into_owned(),
            found: String::from_utf8_lossy(found).into_owned(),
        }),
    }
}

fn token_texts<'a>((name, metadata): NamedMetadata<'a>) -> Result<Vec<&'a [u8]>, DraftVocabularyError> {
    let texts = metadata.require::<StringArray<'_>>(TOKENS_KEY);
    let texts = texts.map_err(|source| DraftVocabularyError::Key { model: name.to_owned(), source })?;
    Ok(texts.iter().collect())
}

#[cfg(test)]
mod tests {
    use gguf::MetadataBuilder;

    use super::*;

    fn metadata(tokens: &[&str]) -> Metadata {
        let mut builder = MetadataBuilder::default();
        builder.put(TOKENS_KEY, tokens).unwrap();
        Metadata::parse(builder.bytes().to_vec()).unwrap()
    }

    #[test]
    fn vocabularies_that_differ_only_in_padding_are_equal() {
        let (model, draft) = (metadata(&["a", "b", "c"]), metadata(&["a", "b"]));
        check(("large", &model), ("small", &draft)).unwrap();
        check(("small", &draft), ("large", &model)).unwrap();
    }

    #[test]
    fn a_different_vocabulary_is_refused_with_both_model_names() {
        let error = check(("large", &metadata(&["a", "b", "c"])), ("small", &metadata(&["a", "x", "c"])));
        let text = error.unwrap_err().to_string();
        assert_eq!(text, "model \"small\" cannot draft for \"large\": token 1 is \"x\", \"large\" has \"b\"");
        let many: Vec<String> = (0..600).map(|id| id.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let text = check(("large", &metadata(&many)), ("small", &metadata(&["0"]))).unwrap_err().to_string();
        assert!(text.contains("it has 1 tokens, \"large\" has 600"), "{text}");
        let without = Metadata::parse(Vec::new()).unwrap();
        assert!(check(("large", &without), ("small", &without)).is_err());
    }
}
