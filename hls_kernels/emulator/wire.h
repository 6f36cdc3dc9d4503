// The part of protobuf's wire format that XRT's emulation uses: numbers and byte strings in numbered fields.
#pragma once
#include <stdint.h>

#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

namespace csd::emulator {

struct BadMessage : std::runtime_error {
  using runtime_error::runtime_error;
};

// A received message; strings are views into it. If a field occurs twice, the last one counts.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {
    while (!rest_.empty()) {
      const uint64_t key = varint();
      const uint64_t field = key >> 3;
      switch (key & 7) {
        case 0:
          numbers_[field] = varint();
          break;
        case 1:
          consume(8);
          break;
        case 2:
          strings_[field] = consume(varint());
          break;
        case 5:
          consume(4);
          break;
        default:
          throw BadMessage("a field of unknown kind");
      }
    }
  }

  uint64_t number(uint64_t field) const {
    const auto found = numbers_.find(field);
    return found == numbers_.end() ? 0 : found->second;  // what protobuf calls the default
  }

  std::string_view bytes(uint64_t field) const {
    const auto found = strings_.find(field);
    return found == strings_.end() ? std::string_view() : found->second;
  }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint64_t byte = uint8_t(consume(1)[0]);
      value |= (byte & 127) << shift;
      if (byte < 128) return value;
    }
    throw BadMessage("a number without an end");
  }

  std::string_view consume(uint64_t bytes) {
    if (bytes > rest_.size()) throw BadMessage("a field beyond its end");
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }

  std::string_view rest_;
  std::map<uint64_t, uint64_t> numbers_;
  std::map<uint64_t, std::string_view> strings_;
};

// A message to be sent.
class Answer {
 public:
  Answer &number(uint64_t field, uint64_t value) {
    varint(field << 3);
    varint(value);
    return *this;
  }

  Answer &bytes(uint64_t field, std::string_view value) {
    varint(field << 3 | 2);
    varint(value.size());
    message_ += value;
    return *this;
  }

  const std::string &message() const { return message_; }

 private:
  void varint(uint64_t value) {
    for (; value > 127; value >>= 7) message_ += char(value | 128);
    message_ += char(value);
  }

  std::string message_;
};

}  // namespace csd::emulator
