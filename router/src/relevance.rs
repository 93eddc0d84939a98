// SPDX-License-Identifier: Apache-2.0

//! How well documents answer a query.
//!
//! | pooling of the model | prompts | score |
//! |---|---|---|
//! | rank, one label | query and document in the model's template | sigmoid of the label, 0 to 1 |
//! | rank, several labels | the same | probability of the first label ("yes"), 0 to 1 |
//! | mean, last | each query and each document | cosine of the angle between both, -1 to 1 |

use proto::v1::Pooling;

use crate::embedding::{length_of, truncate_input};
use crate::model::{EncodeTextError, ServedModel};

/// Pairs of a query and a document: one query for all documents, or one for each.
#[derive(Debug)]
pub(crate) struct TextPairs {
    pub(crate) queries: Vec<String>,
    pub(crate) documents: Vec<String>,
}

impl TextPairs {
    /// The prompts whose pooled vectors [`Self::scores`] takes. `limit` is the most tokens of a
    /// prompt; longer ones are cut.
    pub(crate) fn tokenize(
        &self,
        model: &ServedModel,
        limit: Option<usize>,
    ) -> Result<Vec<Vec<u32>>, EncodeTextError> {
        if model.description.pooling == Pooling::Rank {
            let pairs = self.documents.iter().enumerate();
            let encode = |(index, document): (usize, &String)| {
                model.text.encode_pair(&self.queries[self.query_of(index)], document, limit)
            };
            return pairs.map(encode).collect();
        }
        let encode = |text: &String| {
            let mut tokens = model.text.encode(text, true)?;
            if let Some(limit) = limit {
                truncate_input(model, &mut tokens, limit);
            }
            Ok(tokens)
        };
        self.queries.iter().chain(&self.documents).map(encode).collect()
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
        TextPairs { queries: vec![String::new(); queries], documents: vec![String::new(); documents] }
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
