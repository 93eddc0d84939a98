// SPDX-License-Identifier: Apache-2.0

//! How well documents answer a query.
//!
//! | pooling of the model | prompts | score |
//! |---|---|---|
//! | rank, one label | query and document in the model's template | sigmoid of the label, 0 to 1 |
//! | rank, several labels | the same | probability of the first label ("yes"), 0 to 1 |
//! | mean, last | each query and each document | cosine of the angle between both, -1 to 1 |

use proto::v1::Pooling;

use crate::embedding::{InputName, length_of, truncate_input};
use crate::model::{EncodeTextError, PairLimits, ServedModel};

/// Bytes of the prompts of all pairs together. A query is part of the prompt of each document: this
/// keeps a small body from becoming gigabytes. It is eight times the largest body by default, and a
/// tokenizer reads it within seconds.
const PROMPT_BYTES_MAX: usize = 64 << 20;

/// Pairs of a query and a document: one query for all documents, or one for each.
#[derive(Debug)]
pub(crate) struct TextPairs {
    pub(crate) queries: Vec<String>,
    pub(crate) documents: Vec<String>,
    pub(crate) fields: PairFields,
}

/// Names of the fields with the texts, for errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairFields {
    pub(crate) query: &'static str,
    pub(crate) documents: &'static str,
}

/// Why pairs of texts cannot become prompts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PairError {
    #[error(
        "`{documents}`: the prompts of all documents have {bytes} bytes, each with its query; allowed are \
         {PROMPT_BYTES_MAX} together: send fewer documents, or shorter texts"
    )]
    TooManyBytes { documents: &'static str, bytes: usize },
    #[error("{input}: {source}")]
    Encode { input: InputName, source: EncodeTextError },
    /// Also without a document.
    #[error("{input} makes a prompt of {tokens} tokens without a document, allowed are {max}")]
    QueryTooLong { input: InputName, tokens: usize, max: usize },
    #[error("{input} makes a prompt of {tokens} tokens, this model's maximum context length is {context}")]
    PromptTooLong { input: InputName, tokens: usize, context: usize },
}

impl PairError {
    pub(crate) fn param(&self) -> &'static str {
        match self {
            Self::TooManyBytes { documents, .. } => documents,
            Self::Encode { input, .. }
            | Self::QueryTooLong { input, .. }
            | Self::PromptTooLong { input, .. } => input.field,
        }
    }

    pub(crate) fn is_context_exceeded(&self) -> bool {
        matches!(self, Self::QueryTooLong { .. } | Self::PromptTooLong { .. })
    }
}

impl TextPairs {
    /// Prompts of the pairs: those whose pooled vectors [`Self::scores`] takes.
    pub(crate) fn prompt_count(&self, pooling: Pooling) -> usize {
        match pooling {
            Pooling::Rank => self.documents.len(),
            _ => self.queries.len() + self.documents.len(),
        }
    }

    /// Bytes of all prompts together, if they are few enough.
    pub(crate) fn prompt_bytes(&self, model: &ServedModel) -> Result<usize, PairError> {
        let length = |texts: &[String]| texts.iter().map(String::len).sum::<usize>();
        let (queries, documents) = (length(&self.queries), length(&self.documents));
        let bytes = match model.description.pooling {
            Pooling::Rank => {
                let pairs = self.documents.len();
                let repeated = queries.saturating_mul(pairs / self.queries.len().max(1));
                let template = model.text.pair_template_bytes().saturating_mul(pairs);
                repeated.saturating_add(documents).saturating_add(template)
            }
            _ => queries + documents,
        };
        match bytes > PROMPT_BYTES_MAX {
            true => Err(PairError::TooManyBytes { documents: self.fields.documents, bytes }),
            false => Ok(bytes),
        }
    }

    /// The prompts whose pooled vectors [`Self::scores`] takes. Ends with the first that is too
    /// long. Control tokens come from the model's template only, never from a text. If documents
    /// are to be cut, they are cut until a prompt has at most `most` tokens.
    pub(crate) fn tokenize(
        &self,
        model: &ServedModel,
        mut limits: PairLimits,
        most: u32,
    ) -> Result<Vec<Vec<u32>>, PairError> {
        let pooling = model.description.pooling;
        let mut prompts = Vec::with_capacity(self.prompt_count(pooling));
        if pooling == Pooling::Rank {
            limits.prompt = limits.prompt.or(limits.document.map(|_| most as usize));
            for (index, document) in self.documents.iter().enumerate() {
                let query = self.query_of(index);
                if query == index {
                    self.check_query(model, query, limits)?;
                }
                let prompt = model.text.encode_pair(&self.queries[query], document, limits);
                prompts.push(self.checked(model, index, prompt)?);
            }
            return Ok(prompts);
        }
        let document_limit = [limits.document, limits.prompt].into_iter().flatten().min();
        let limits_of = [(&self.queries, limits.prompt), (&self.documents, document_limit)];
        for (texts, limit) in limits_of {
            for text in texts {
                let mut prompt = model.text.encode_plain(text, true);
                if let (Ok(tokens), Some(limit)) = (&mut prompt, limit) {
                    truncate_input(model, tokens, limit);
                }
                prompts.push(self.checked(model, prompts.len(), prompt)?);
            }
        }
        Ok(prompts)
    }

    /// Refuses a query that leaves no document a place, before it is encoded with each of them.
    fn check_query(&self, model: &ServedModel, query: usize, limits: PairLimits) -> Result<(), PairError> {
        let input = InputName { field: self.fields.query, index: (self.queries.len() > 1).then_some(query) };
        let alone = model.text.encode_pair(&self.queries[query], "", PairLimits::default());
        let tokens = alone.map_err(|source| PairError::Encode { input, source })?.len();
        let max = limits.prompt.unwrap_or(model.description.context_tokens as usize);
        if tokens > max {
            return Err(PairError::QueryTooLong { input, tokens, max });
        }
        Ok(())
    }

    /// The prompt with this index, if it was encoded and is not too long.
    fn checked(
        &self,
        model: &ServedModel,
        index: usize,
        prompt: Result<Vec<u32>, EncodeTextError>,
    ) -> Result<Vec<u32>, PairError> {
        let input = self.name_of(model.description.pooling, index);
        let prompt = prompt.map_err(|source| PairError::Encode { input, source })?;
        let (tokens, context) = (prompt.len(), model.description.context_tokens as usize);
        match tokens > context {
            true => Err(PairError::PromptTooLong { input, tokens, context }),
            false => Ok(prompt),
        }
    }

    /// The text that the prompt with this index stands for.
    pub(crate) fn name_of(&self, pooling: Pooling, prompt: usize) -> InputName {
        let queries = self.queries.len();
        match pooling {
            Pooling::Rank => InputName { field: self.fields.documents, index: Some(prompt) },
            _ if prompt < queries => {
                InputName { field: self.fields.query, index: (queries > 1).then_some(prompt) }
            }
            _ => InputName { field: self.fields.documents, index: Some(prompt - queries) },
        }
    }

    /// The score of each document.
    pub(crate) fn scores(&self, pooling: Pooling, vectors: &[Vec<f32>]) -> Vec<f64> {
        if pooling == Pooling::Rank {
            return vectors.iter().map(|labels| probability(labels)).collect();
        }
        let (queries, documents) = vectors.split_at(self.queries.len());
        let pairs = documents.iter().enumerate();
        pairs.map(|(index, document)| cosine(&queries[self.query_of(index)], document)).collect()
    }

    fn query_of(&self, document: usize) -> usize {
        if self.queries.len() == 1 { 0 } else { document }
    }
}

/// Indices of the best `top` scores. Among equals the earlier document comes first.
pub(crate) fn ranking(scores: &[f64], top: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(top);
    order
}

/// The probability of the first label, as Qwen's rerankers name "yes".
fn probability(labels: &[f32]) -> f64 {
    let Some((&first, others)) = labels.split_first() else { return 0.0 };
    let first = f64::from(first);
    match others {
        [] => 1.0 / (1.0 + (-first).exp()),
        others => 1.0 / (1.0 + others.iter().map(|&other| (f64::from(other) - first).exp()).sum::<f64>()),
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let product: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    let lengths = length_of(a) * length_of(b);
    if lengths > 0.0 { (product / lengths).clamp(-1.0, 1.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(queries: usize, documents: usize) -> TextPairs {
        TextPairs {
            queries: vec![String::new(); queries],
            documents: vec![String::new(); documents],
            fields: PairFields { query: "query", documents: "documents" },
        }
    }

    #[test]
    fn a_classifier_gives_the_probability_of_its_first_label() {
        let scores = |labels: &[f32]| pairs(1, 1).scores(Pooling::Rank, &[labels.to_vec()])[0];
        assert!((scores(&[0.0]) - 0.5).abs() < 1e-12 && (scores(&[2.0, 0.0]) - scores(&[2.0])).abs() < 1e-12);
        assert_eq!((scores(&[-1e30]), scores(&[1e30, -1e30])), (0.0, 1.0));
    }

    #[test]
    fn embeddings_are_compared_with_their_query() {
        let vectors: Vec<Vec<f32>> =
            [[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, -1.0]].map(Vec::from).to_vec();
        assert_eq!(pairs(1, 3).scores(Pooling::Last, &vectors), [0.0, 1.0, 0.0]);
        assert_eq!(pairs(2, 2).scores(Pooling::Mean, &vectors), [1.0, -1.0]);
    }

    #[test]
    fn the_best_come_first_and_equals_keep_their_order() {
        assert_eq!(ranking(&[0.1, 0.9, 0.1, 0.5], 3), [1, 3, 0]);
    }
}
