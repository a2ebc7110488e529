//! The octal escapes of the kernel's tables, such as `/proc/self/mountinfo`.

/// Decodes `\040` for blank, and tab, newline and backslash likewise.
pub fn unescape_octal(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut i = 0;
    while i < field.len() {
        match field.get(i + 1..i + 4) {
            Some(digits) if field[i] == b'\\' && digits.iter().all(|b| (b'0'..=b'7').contains(b)) => {
                out.push(digits.iter().fold(0u8, |n, d| n.wrapping_mul(8).wrapping_add(d - b'0')));
                i += 4;
            }
            _ => {
                out.push(field[i]);
                i += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::unescape_octal;

    #[test]
    fn three_digits_after_a_backslash_are_a_byte() {
        assert_eq!(unescape_octal(br"/mnt/my\040data\134"), br"/mnt/my data\");
        assert_eq!(unescape_octal(br"\04\089\"), br"\04\089\");
        assert_eq!(unescape_octal(br"\303\244"), "ä".as_bytes());
    }
}
