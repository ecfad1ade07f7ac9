#pragma once
struct CGSize {
  double width, height;
};
struct CGPoint {
  double x, y;
};
struct CGRect {
  CGPoint origin;
  CGSize size;
};
