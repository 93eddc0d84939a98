// SPDX-License-Identifier: Apache-2.0

//! Checks what a backend returns to its caller: ranges of rows, and shortlists of rows.

use kernels::Cpu;
use ops::{Backend, DrawParams, Reference, Shortlist};

const ROWS: usize = 5;
const COLS: usize = 700;

fn values() -> Vec<f32> {
    (0..ROWS * COLS).map(|i| (i * 7919 % 1000) as f32 / 37.0).collect()
}

fn reads_runs_of_rows<B: Backend>(mut backend: B) {
    let (host, mut x) = (values(), backend.tensor(ROWS, COLS).unwrap());
    backend.write(&mut x, ROWS, &host).unwrap();
    for run in [0..1, 2..4, 4..5, 3..3, 0..5] {
        let mut found = vec![f32::NAN; run.len() * COLS];
        backend.read_rows(&x, run.clone(), &mut found).unwrap();
        assert_eq!(found, host[run.start * COLS..run.end * COLS], "rows {run:?}");
    }
    assert!(backend.read_rows(&x, 4..6, &mut vec![0.0; 2 * COLS]).is_err());
    assert!(backend.read_rows(&x, 0..2, &mut vec![0.0; COLS]).is_err());
}

#[test]
fn read_rows_returns_a_range_of_rows() {
    reads_runs_of_rows(Cpu::new(1).unwrap());
    reads_runs_of_rows(Reference::new());
}

fn shortlists<B: Backend>(mut backend: B) -> Vec<Shortlist> {
    let mut x = backend.tensor(ROWS, COLS).unwrap();
    backend.write(&mut x, ROWS, &values()).unwrap();
    let params_of =
        |row: usize| DrawParams { temperature: 0.7, uniform: (row > 0).then_some(row as f64 / 5.0) };
    let draw_params: Vec<DrawParams> = (0..ROWS).map(params_of).collect();
    let mut lists = vec![Shortlist::default(); ROWS];
    backend.shortlists(&x, COLS, &draw_params, &mut lists).unwrap();
    assert!(backend.shortlists(&x, COLS, &draw_params, &mut lists[1..]).is_err());
    lists
}

#[test]
fn backends_make_equal_shortlists() {
    let lists = shortlists(Cpu::new(1).unwrap());
    assert_eq!(lists, shortlists(Reference::new()));
    assert!(lists.iter().all(|list| list.best().len() == ops::SHORTLIST_LEN && list.total() > 1.0));
    assert_eq!(lists.iter().filter(|list| list.drawn().is_some()).count(), ROWS - 1);
}
