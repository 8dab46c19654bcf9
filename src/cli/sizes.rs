//! Sizes as people write them.

/// `512M`, `2G`, `64KiB`: powers of 1024, but for `KB`, `MB` and `GB`, which are powers of 1000.
pub fn parse(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (base, power) = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => (1, 0),
        "k" | "kib" => (1024, 1),
        "m" | "mib" => (1024, 2),
        "g" | "gib" => (1024, 3),
        "t" | "tib" => (1024, 4),
        "kb" => (1000, 1),
        "mb" => (1000, 2),
        "gb" => (1000, 3),
        "tb" => (1000, 4),
        _ => return Err("a size is a number and K, M, G or T, such as 512M".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "a size begins with a number".to_owned())?;
    number.checked_mul(u64::pow(base, power)).ok_or_else(|| "too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn units_are_what_people_mean() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("128K", 128 << 10),
            ("64 KiB", 64 << 10),
            ("512m", 512 << 20),
            ("2G", 2 << 30),
            ("2GB", 2_000_000_000),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "-1", "1.5G", "1X", "1 000", "99999999999T", "18446744073709551616"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
