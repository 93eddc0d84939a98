// SPDX-License-Identifier: Apache-2.0

//! [`WeightTable`]: the tensors of a model by name. `take` checks shape and type. Tensors that
//! remain are not read by the architecture.

use ops::{Backend, Linear, Weight};
use quant::DType;
use std::collections::BTreeMap;

/// Why a tensor is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    #[error("tensor {name} is missing, expected shape {expected:?}")]
    Missing { name: String, expected: Vec<usize> },
    #[error("tensor {name} has shape {found:?}, expected {expected:?}")]
    Shape { name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("tensor {name} is {found}, expected F32")]
    NotF32 { name: String, found: DType },
    #[error(
        "tensor {name} is {found}, a type that cannot be computed with; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K can"
    )]
    Type { name: String, found: DType },
    #[error("tensor {name} occurs twice")]
    Duplicate { name: String },
}

/// Weights by name. The builder of a model takes them one by one.
pub struct WeightTable<B: Backend> {
    weights: BTreeMap<String, Weight<B>>,
}

impl<B: Backend> Default for WeightTable<B> {
    fn default() -> Self {
        Self { weights: BTreeMap::new() }
    }
}

impl<B: Backend> WeightTable<B> {
    pub fn new() -> Self {
        Self::default()
    }

    /// `weight.dims` may have trailing ones.
    pub fn insert(&mut self, name: String, mut weight: Weight<B>) -> Result<(), WeightError> {
        weight.dims = without_trailing_ones(&weight.dims);
        if self.weights.contains_key(&name) {
            return Err(WeightError::Duplicate { name });
        }
        self.weights.insert(name, weight);
        Ok(())
    }

    /// Names of the tensors that were not taken.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }

    /// Takes a matrix, or a stack of matrices, of a type with kernels.
    pub(crate) fn take(&mut self, name: &str, dims: &[usize]) -> Result<Weight<B>, WeightError> {
        self.take_optional(name, dims)?
            .ok_or_else(|| WeightError::Missing { name: name.to_owned(), expected: dims.to_vec() })
    }

    pub(crate) fn take_optional(
        &mut self,
        name: &str,
        dims: &[usize],
    ) -> Result<Option<Weight<B>>, WeightError> {
        let Some(weight) = self.weights.remove(name) else { return Ok(None) };
        if weight.dims != without_trailing_ones(dims) {
            let (found, expected) = (weight.dims, dims.to_vec());
            return Err(WeightError::Shape { name: name.to_owned(), found, expected });
        }
        if weight.dtype.activation().is_none() {
            return Err(WeightError::Type { name: name.to_owned(), found: weight.dtype });
        }
        Ok(Some(weight))
    }

    /// Takes a norm weight, a bias or a factor: one row of f32.
    pub(crate) fn take_vector(&mut self, name: &str, len: usize) -> Result<Weight<B>, WeightError> {
        self.take_optional_vector(name, len)?
            .ok_or_else(|| WeightError::Missing { name: name.to_owned(), expected: vec![len] })
    }

    pub(crate) fn take_optional_vector(
        &mut self,
        name: &str,
        len: usize,
    ) -> Result<Option<Weight<B>>, WeightError> {
        match self.take_optional(name, &[len])? {
            Some(weight) if weight.dtype != DType::F32 => {
                Err(WeightError::NotF32 { name: name.to_owned(), found: weight.dtype })
            }
            weight => Ok(weight),
        }
    }

    /// Takes `NAME.weight` and, if the file has it, `NAME.bias`.
    pub(crate) fn take_linear(
        &mut self,
        name: &str,
        n_in: usize,
        n_out: usize,
    ) -> Result<Linear<B>, WeightError> {
        let weight = self.take(&format!("{name}.weight"), &[n_in, n_out])?;
        let bias = self.take_optional_vector(&format!("{name}.bias"), n_out)?;
        Ok(Linear { weight, bias })
    }
}

/// A shape in the form of [`Weight::dims`]: never empty, `[n]` for a vector.
fn without_trailing_ones(dims: &[usize]) -> Vec<usize> {
    let len = dims.iter().rposition(|&dim| dim != 1).map_or(1, |last| last + 1);
    let mut dims = dims.to_vec();
    dims.resize(len, 1);
    dims
}

#[cfg(test)]
mod tests {
    use super::*;
    use ops::Reference;

    fn table(dims: &[usize], dtype: DType) -> WeightTable<Reference> {
        let mut table = WeightTable::new();
        let weight = Weight { dtype, dims: dims.to_vec(), layout: 0, data: bytes::Bytes::new() };
        table.insert("a.weight".to_owned(), weight).unwrap();
        table
    }

    #[test]
    fn trailing_ones_do_not_matter() {
        assert!(table(&[4, 1, 1, 1], DType::F32).take_vector("a.weight", 4).is_ok());
        assert!(table(&[1, 1], DType::F32).take_vector("a.weight", 1).is_ok());
        assert!(table(&[4, 1, 1, 1], DType::F32).take("a.weight", &[4, 1]).is_ok());
    }

    #[test]
    fn refusals_name_the_tensor() {
        let text = |result: Result<Weight<Reference>, WeightError>| result.err().unwrap().to_string();
        assert_eq!(
            text(table(&[4, 2], DType::F32).take("a.weight", &[4, 3])),
            "tensor a.weight has shape [4, 2], expected [4, 3]"
        );
        assert_eq!(
            text(table(&[4, 2], DType::I8).take("a.weight", &[4, 2])),
            "tensor a.weight is I8, a type that cannot be computed with; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K can"
        );
        assert_eq!(
            text(table(&[4], DType::F16).take_vector("a.weight", 4)),
            "tensor a.weight is F16, expected F32"
        );
        assert_eq!(
            text(table(&[4], DType::F32).take("b.weight", &[4])),
            "tensor b.weight is missing, expected shape [4]"
        );
    }

    #[test]
    fn a_name_stands_for_one_tensor() {
        let mut table = table(&[4], DType::F32);
        let again = table.weights["a.weight"].clone();
        assert!(matches!(
            table.insert("a.weight".to_owned(), again),
            Err(WeightError::Duplicate { name }) if name == "a.weight"
        ));
    }
}
