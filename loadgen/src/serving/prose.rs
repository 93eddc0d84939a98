// SPDX-License-Identifier: Apache-2.0

//! Prompts of English words, with a wanted number of tokens.

use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;

/// Frequent words, so that tokenizers of English need about one token for each.
const WORDS: &str = "about above across action after again against age air all almost along already also \
    always among amount and animal another answer any area around art ask back balance bank base be \
    because become before began begin being below best better between big bird black blue board boat \
    body book both bottom box bring brother brown build business but buy call came can car care carry \
    case cause center central change check child choose circle city class clean clear close cold color \
    come common company complete consider contain control cook cool copy corn cost could country course \
    cover create cross cry current cut dark data day decide deep design develop did differ direct do \
    doctor does done door down draw dream drive drop dry during each early earth ease east eat edge \
    effect egg eight either electric end energy engine enough equal even evening ever every exact \
    example experience eye face fact fall family far farm fast father feel feet few field figure fill \
    final find fine finger fire first fish five flat floor flow flower fly follow food foot for force \
    forest form forward found four free friend from front fruit full game garden gas gave general get \
    give glass go gold good got govern grand grass great green ground group grow had half hand happen \
    happy hard has have he head hear heart heat heavy help her here high hill him his history hold home \
    horse hot hour house how human hundred idea if imagine in inch industry instant interest iron island \
    it job join just keep key kind king knew know land language large last late laugh law lay lead learn \
    least leave left length less let letter level life lift light like line list listen little live long \
    look love low machine made main make man many map mark market master material matter may mean \
    measure meet method middle might mile mind minute money month moon more morning most mother motion \
    mountain move much music must name nation nature near need never new next night north note nothing \
    notice now number object observe ocean of off office often oil old on once one only open operate or \
    orange order other our out over own page paint paper part pass past path pattern pay people perhaps \
    person picture piece place plain plan plane plant play point poor position possible power present \
    press problem process produce product program public pull push put question quick quiet rain ran \
    reach read ready real reason receive record red region remember report rest result rich right river \
    road rock room round rule run safe said same science sea season second see seem self send sentence \
    serve set seven several shape share she ship short should show side sign silver simple since sing \
    sister six size sky sleep slow small snow social some song soon sound south space special speed \
    spring square stand star start state stay step still stone stood stop store story street strong \
    student study such summer sun support sure surface system table take talk teacher team tell ten test \
    than that the their them then there these they thing think third this those though thought thousand \
    three through time to today together told too took top toward town travel tree true try turn two \
    under understand unit until up use usual valley value very view village visit voice wait walk wall \
    want war warm was watch water wave way we wear weather week weight well went were west what wheel \
    when where which while white who whole why wide wild will wind window winter wish with woman wonder \
    wood word work world would write year yellow yes yet young your";

/// The mean length of a word with its space is 5.7 bytes.
const HALF_A_WORD: usize = 3;

/// Writes words until the text has about this many bytes, on average exactly. The text has at least
/// one word.
pub(crate) fn write_words(random: &mut Xoshiro256PlusPlus, bytes: usize) -> String {
    let words: Vec<&str> = WORDS.split_ascii_whitespace().collect();
    let mut text = words[random.random_range(0..words.len())].to_owned();
    while text.len() + HALF_A_WORD < bytes {
        text.push(' ');
        text.push_str(words[random.random_range(0..words.len())]);
    }
    text
}

/// How many tokens the server counts for a text of such words. Measured with two prompts, because
/// every server has a tokenizer of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenScale {
    /// Tokens of the chat template and the beginning of a sequence.
    overhead: f64,
    per_byte: f64,
}

/// A text of this many bytes has this many tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountedPrompt {
    pub(crate) bytes: usize,
    pub(crate) tokens: u64,
}

impl TokenScale {
    /// English in the vocabularies of current models: 4 to 5 bytes a token, with its space.
    pub const TYPICAL: Self = Self { overhead: 0.0, per_byte: 1.0 / 4.5 };

    /// The line through two prompts. `None` if the longer one does not have more tokens.
    pub(crate) fn through(short: CountedPrompt, long: CountedPrompt) -> Option<Self> {
        let (bytes, tokens) =
            (long.bytes as f64 - short.bytes as f64, long.tokens as f64 - short.tokens as f64);
        let per_byte = tokens / bytes;
        let overhead = (short.tokens as f64 - per_byte * short.bytes as f64).max(0.0);
        (per_byte > 0.0 && per_byte.is_finite()).then_some(Self { overhead, per_byte })
    }

    /// Bytes of a prompt that has this many tokens, with the template.
    pub(crate) fn prompt_bytes(&self, tokens: u32) -> usize {
        ((f64::from(tokens) - self.overhead).max(1.0) / self.per_byte).round() as usize
    }

    /// Tokens of a text by itself. At least 1.
    pub(crate) fn text_tokens(&self, text: &str) -> u32 {
        (text.len() as f64 * self.per_byte).round().clamp(1.0, f64::from(u32::MAX)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn a_text_has_the_wanted_bytes_up_to_one_word() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        for bytes in [0, 1, 100, 5000] {
            let text = write_words(&mut random, bytes);
            assert!(text.len() + 3 >= bytes && text.len() < bytes + 12 && !text.is_empty(), "{text}");
        }
        let mean = (0..1000).map(|_| write_words(&mut random, 200).len()).sum::<usize>() as f64 / 1000.0;
        assert!((mean - 200.0).abs() < 1.0, "{mean}");
    }

    #[test]
    fn a_scale_finds_the_overhead_of_the_template() {
        let short = CountedPrompt { bytes: 100, tokens: 25 };
        let long = CountedPrompt { bytes: 500, tokens: 105 };
        let scale = TokenScale::through(short, long).unwrap();
        assert_eq!(scale, TokenScale { overhead: 5.0, per_byte: 0.2 });
        assert_eq!(scale.prompt_bytes(105), 500);
        assert_eq!(scale.prompt_bytes(2), 5, "a prompt below the overhead still has a word");
        assert_eq!(scale.text_tokens(&"x".repeat(50)), 10);
        assert_eq!(TokenScale::through(long, long), None);
    }
}
